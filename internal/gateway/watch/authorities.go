package watch

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// authority is a ConfigMap or a Secret with certificates that verify backends or clients. Like a Secret of a listener it is followed
// by its name.
type authority struct {
	stop   context.CancelFunc
	certs  []*x509.Certificate // nil if it cannot be used
	listed bool
}

// setPolicy takes a BackendTLSPolicy over, nil if it has gone. What has backends that it targets, or has targeted before, is built
// again. The caller holds mu.
func (w *Watch) setPolicy(n svc.Name, p *gwv1.BackendTLSPolicy) bool {
	w.copies.policies = nil
	for _, service := range w.objects.Policies.Set(n, p) {
		for g := range w.serviceUsers[service] {
			w.dirty[g] = true
		}
		for s, m := range w.meshes {
			if m.Refers(service) {
				w.dirtyMesh[s] = true
			}
		}
	}
	return true
}

// followAuthorities follows the objects with authorities that fronts name, and no others. The caller holds mu.
func (w *Watch) followAuthorities(ctx context.Context, running *sync.WaitGroup) {
	for r := range w.changedAuthorities {
		a, named := w.authorities[r], len(w.authorityUsers[r]) > 0
		if named && a == nil {
			w.followAuthority(ctx, running, r)
		} else if !named && a != nil {
			a.stop()
			if !a.listed {
				w.pending--
			}
			delete(w.authorities, r)
			if _, known := w.objects.Authorities[r]; known {
				delete(w.objects.Authorities, r)
				w.dirtyAuthority(r)
			}
		}
	}
	clear(w.changedAuthorities)
}

// dirtyAuthority has the fronts that name an object built again. The caller holds mu.
func (w *Watch) dirtyAuthority(r trust.Ref) {
	for f := range w.authorityUsers[r] {
		w.dirty[f.Name] = true
	}
}

func (w *Watch) followAuthority(ctx context.Context, running *sync.WaitGroup, r trust.Ref) {
	a := &authority{}
	w.authorities[r] = a
	w.pending++
	ctx, a.stop = context.WithCancel(reflector.Quiet(ctx))
	change := func(text []byte, exists bool) {
		w.mu.Lock()
		if w.authorities[r] == a {
			if !a.listed {
				a.listed = true
				w.pending--
			}
			before, known := w.objects.Authorities[r]
			certs, problem := ReadAuthorities(text)
			same := known == exists && before == problem && slices.EqualFunc(certs, a.certs, (*x509.Certificate).Equal)
			if !same {
				a.certs = certs
				if delete(w.objects.Authorities, r); exists {
					w.objects.Authorities[r] = problem
				}
				w.dirtyAuthority(r)
			}
		}
		w.mu.Unlock()
		w.o.Changed()
	}
	core := w.o.Client.CoreV1()
	unread := func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return !a.listed
	}
	if r.Kind == trust.ConfigMap {
		followOne(ctx, running, "gateway/authority", core.ConfigMaps(r.Namespace), r.Name.Name, unread, func(o *corev1.ConfigMap) {
			if o == nil {
				change(nil, false)
				return
			}
			change([]byte(o.Data[trust.Entry]), true)
		})
		return
	}
	followOne(ctx, running, "gateway/authority", core.Secrets(r.Namespace), r.Name.Name, unread, func(o *corev1.Secret) {
		if o == nil {
			change(nil, false)
			return
		}
		change(o.Data[trust.Entry], true)
	})
}

// followOne follows an object by its name until ctx ends. change gets nil while it does not exist, and, so that others need not wait,
// after a failure while unread reports true.
func followOne[T any, L runtime.Object, P interface {
	*T
	metav1.Object
}](ctx context.Context, running *sync.WaitGroup, of string, client reflector.Client[L], name string, unread func() bool, change func(P),
) {
	sink := reflector.Sink[P]{
		Replace: func(list []P) {
			if len(list) == 0 {
				change(nil)
				return
			}
			change(list[0])
		},
		Set:    change,
		Delete: func(P) { change(nil) },
	}
	selects := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()}
	from := reflector.From(client, selects).Observed(func(err error) {
		if err != nil && unread() {
			change(nil)
		}
	})
	running.Go(func() { reflector.Run(ctx, of, from, sink) })
}

// ReadAuthorities returns the certificates in a text in PEM, or why it cannot be used. Other blocks in it are passed over.
func ReadAuthorities(text []byte) (certs []*x509.Certificate, problem string) {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, "its entry " + trust.Entry + " has a certificate that cannot be parsed"
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, "its entry " + trust.Entry + " has no certificate"
	}
	return certs, ""
}

// trusted returns the certificates of the objects that can be used.
func (w *Watch) trusted() map[trust.Ref][]*x509.Certificate {
	out := make(map[trust.Ref][]*x509.Certificate, len(w.authorities))
	for r, a := range w.authorities {
		if a.certs != nil {
			out[r] = a.certs
		}
	}
	return out
}
