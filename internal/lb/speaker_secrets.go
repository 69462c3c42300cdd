package lb

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// secretUse is what a Secret that a Service of the proxied way names is for.
type secretUse int

const (
	forTLS  secretUse = iota
	forLogs           // credentials for a bucket
)

func (u secretUse) String() string {
	if u == forLogs {
		return "Secret of access logs"
	}
	return "TLS Secret"
}

// secretKey is a Secret, for a use.
type secretKey struct {
	svc.Name
	use secretUse
}

// namedSecret is a Secret that a Service of the proxied way names. It is watched by its name: a node has no right to list
// others.
type namedSecret struct {
	stop context.CancelFunc
	// cert or credentials are the last ones that could be used, and problem is why the Secret cannot be used as it is now.
	// Neither that nor anything else has a part of a key.
	cert        *tls.Certificate
	credentials *logship.Credentials
	problem     string
	// staple is for cert, and stapleProblem is why the Secret's one is not used.
	staple        staple
	stapleProblem string
	// challenges are what an authority of ACME is answered with.
	challenges map[string]*tls.Certificate
}

// secretsOf returns the Secrets that a Service names.
func secretsOf(n svc.Name, spec *dialect.Spec) (out []secretKey) {
	if spec == nil {
		return nil
	}
	for _, name := range spec.TLSSecrets() {
		out = append(out, secretKey{svc.Name{Namespace: n.Namespace, Name: name}, forTLS})
	}
	if spec.AccessLog.Uploads() {
		out = append(out, secretKey{svc.Name{Namespace: n.Namespace, Name: spec.AccessLog.Secret}, forLogs})
	}
	return out
}

// followSecrets follows the Secrets that are named, and no others.
func (p *proxying) followSecrets(ctx context.Context, running *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	named := map[secretKey]bool{}
	for n, v := range p.services {
		for _, key := range secretsOf(n, v.spec) {
			named[key] = key.use == forTLS || p.upload != nil
		}
	}
	for key, t := range p.secrets {
		if !named[key] {
			t.stop()
			delete(p.secrets, key)
		}
	}
	for key, is := range named {
		if is && p.secrets[key] == nil {
			p.secrets[key] = p.followSecret(ctx, running, key)
		}
	}
}

func (p *proxying) followSecret(ctx context.Context, running *sync.WaitGroup, key secretKey) *namedSecret {
	t := &namedSecret{}
	ctx, t.stop = context.WithCancel(reflector.Quiet(ctx))
	change := func(f func()) {
		p.changed(func() {
			f()
			p.rebuild(key)
		})
	}
	set := func(s *corev1.Secret) {
		change(func() {
			if key.use == forLogs {
				t.credentials, t.problem = readLogSecret(s) // what was withdrawn is not used any more
				return
			}
			t.setTLS(s)
		})
	}
	followObject(ctx, running, "lb-speaker/secret", reflector.From(p.client.CoreV1().Secrets(key.Namespace), byName(key.Name.Name)),
		oneObject[*corev1.Secret]{
			set:  set,
			gone: func(problem string) { change(func() { t.problem, t.credentials = problem, nil }) },
			kept: func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return t.cert != nil || t.credentials != nil
			},
			warn: func(err error) {
				p.log.Warn("cannot read a "+key.use.String()+"; retrying", "namespace", key.Namespace, "secret", key.Name.Name, "err", err)
			},
		})
	return t
}

// setTLS takes over a TLS Secret. The same certificate stays the same one: as another one connections to Pods and their health
// checks would start over with it.
func (t *namedSecret) setTLS(s *corev1.Secret) {
	cert, problem := readTLSSecret(s)
	if t.problem = problem; cert == nil {
		return
	}
	if t.cert == nil || !slices.EqualFunc(t.cert.Certificate, cert.Certificate, bytes.Equal) {
		t.cert = cert
	}
	t.staple, t.stapleProblem = readStaple(s, cert.Certificate, time.Now())
	t.challenges = acme.Challenges(s)
}

// rebuild makes the Services that end TLS with a Secret be built again. The lock is held.
func (p *proxying) rebuild(key secretKey) {
	for of, v := range p.services {
		if key.use == forTLS && slices.Contains(secretsOf(of, v.spec), key) {
			v.built = nil
		}
	}
}

// readProblem returns what an Event says of an error of reading a Secret, "" of none. Its text is not for those who
// read the Events of a Service: it has the node's user and addresses, and a port that is another one each time.
func readProblem(err error) string {
	switch {
	case err == nil:
		return ""
	case apierrors.IsForbidden(err):
		return "reading it is forbidden"
	case apierrors.IsNotFound(err):
		return "it does not exist"
	default:
		return "it cannot be read"
	}
}

// readTLSSecret returns the certificate of a Secret, or why there is none.
func readTLSSecret(s *corev1.Secret) (cert *tls.Certificate, problem string) {
	if s.Type != corev1.SecretTypeTLS {
		return nil, fmt.Sprintf("it is of type %s, not %s", s.Type, corev1.SecretTypeTLS)
	}
	c, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	if err != nil { // without the text of the error, which might have parts of a key
		return nil, fmt.Sprintf("its entries %s and %s are not a certificate and its key", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	if c.Leaf == nil { // with GODEBUG x509keypairleaf=0
		if c.Leaf, err = x509.ParseCertificate(c.Certificate[0]); err != nil {
			return nil, "its certificate cannot be parsed"
		}
	}
	return &c, ""
}

// secretProblem returns what is wrong with the certificates with which a Service is served: an older one goes
// on while the Secret has none.
func (p *proxying) secretProblem(n svc.Name, v *proxiedService) string {
	for _, name := range v.spec.TLSSecrets() {
		t := p.secrets[secretKey{svc.Name{Namespace: n.Namespace, Name: name}, forTLS}]
		switch {
		case t == nil:
		case t.problem != "":
			return fmt.Sprintf("cannot use the TLS Secret %s: %s; its last certificate goes on", name, t.problem)
		case t.cert != nil && time.Now().After(t.cert.Leaf.NotAfter):
			return fmt.Sprintf("the certificate of the TLS Secret %s has expired", name)
		case t.stapleProblem != "":
			return fmt.Sprintf("cannot use the OCSP response (%s) of the TLS Secret %s: %s; it is not stapled", stapleEntry, name, t.stapleProblem)
		}
	}
	return ""
}
