package controller

import (
	"crypto/x509"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/acme/nsupdate"
	"github.com/fairlead/fairlead/internal/lb/claim"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// ACME is the authority that certificates are ordered from, and who may have them.
type ACME struct {
	// Directory is the URL of the authority's directory, Email the contact that it may write to, and Roots the authorities
	// that have signed the certificate of its server.
	Directory, Email string
	Roots            *x509.CertPool
	Domains          []acme.Domain
	Limits           acme.Limits
	// Binding is that of acme.Options.
	Binding acme.Binding
	// DNS updates the zones of DNS-01; nil for none.
	DNS *nsupdate.Updater
	// Propagation is that of acme.Options.
	Propagation time.Duration
}

// acmeAccount is the Secret with the key of the account.
var acmeAccount = svc.Name{Namespace: svc.SystemNamespace, Name: svc.ACMEAccountSecret}

// Manager returns what orders certificates for the Services for which isOurs returns true.
func (a *ACME) Manager(
	client kubernetes.Interface, log *slog.Logger, recorder *events.Recorder, isOurs func(*corev1.Service) bool,
) *acme.Manager {
	return acme.New(acme.Options{
		Client: client, Log: log, Directory: a.Directory, Email: a.Email, Roots: a.Roots, Domains: a.Domains, Limits: a.Limits,
		Binding: a.Binding, DNS: a.DNS,
		Propagation: a.Propagation, Account: acmeAccount,
		Wanted: func(o *corev1.Service) (none acme.Want) {
			if o.Annotations[dialect.LBACMEHosts] == "" || o.DeletionTimestamp != nil || !isOurs(o) {
				return none
			}
			r := claim.Read(o)
			if !v1.Proxied(o) || r.Invalid() || r.Way != dialect.Proxied || len(r.Spec.Certificates) == 0 {
				return none
			}
			return acme.Want{Hosts: r.Spec.ACMEHosts, Secret: r.Spec.Certificates[0], Challenge: r.Spec.ACMEChallenge}
		},
		Event: func(of runtime.Object, eventType, reason, text string) { recorder.Event(of, eventType, reason, text) },
	})
}
