package front

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/gateway/trust"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// objectName names a Secret or a ConfigMap of a namespace: secret/NAME or configmap/NAME.
type objectName struct{ namespace, text string }

// authority is an object with the certificates that verify Pods, or clients. Like a TLS Secret it is watched by its name. The Front's
// mu guards it.
type authority struct {
	stop context.CancelFunc
	// pool has the last valid certificates, and problem is why the object cannot be used as it is now.
	pool    *x509.CertPool
	problem string
}

func (a *authority) end() { a.stop() }

// followAuthorities follows the objects that Services name, and no others.
func (f *Front) followAuthorities(ctx context.Context, running *sync.WaitGroup) {
	f.mu.Lock()
	defer f.mu.Unlock()
	named := map[objectName]bool{}
	for n, s := range f.services {
		if s.spec == nil {
			continue
		}
		for _, text := range s.spec.Authorities() {
			named[objectName{n.Namespace, text}] = true
		}
	}
	followNamed(f.authorities, named, func(n objectName) *authority { return f.followAuthority(ctx, running, n) })
}

func (f *Front) followAuthority(ctx context.Context, running *sync.WaitGroup, n objectName) *authority {
	a := &authority{}
	ctx, a.stop = context.WithCancel(reflector.Silent(ctx))
	change := func(text []byte, problem string) {
		pool := x509.NewCertPool()
		if problem == "" && !pool.AppendCertsFromPEM(text) {
			problem = "its entry " + trust.Entry + " has no certificate"
		}
		f.changed(func() {
			a.problem = problem
			if problem == "" && !pool.Equal(a.pool) { // another pool restarts health checks
				a.pool = pool
			}
			for of, s := range f.services {
				if s.spec != nil && of.Namespace == n.namespace && slices.Contains(s.spec.Authorities(), n.text) {
					s.built = nil
				}
			}
		})
	}
	kind, name, _ := strings.Cut(n.text, "/")
	core := f.client.CoreV1()
	if kind == "configmap" {
		followObject(ctx, running, "lb-speaker/authority", reflector.From(core.ConfigMaps(n.namespace), byName(name)),
			authorityObject(f, a, n, change, func(o *corev1.ConfigMap) []byte { return []byte(o.Data[trust.Entry]) }))
		return a
	}
	followObject(ctx, running, "lb-speaker/authority", reflector.From(core.Secrets(n.namespace), byName(name)),
		authorityObject(f, a, n, change, func(o *corev1.Secret) []byte { return o.Data[trust.Entry] }))
	return a
}

// authorityObject calls change with the entry of an object.
func authorityObject[T any](f *Front, a *authority, n objectName, change func(text []byte, problem string),
	entry func(T) []byte) oneObject[T] {
	return oneObject[T]{
		set:  func(o T) { change(entry(o), "") },
		gone: func(problem string) { change(nil, problem) },
		kept: func() bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			return a.pool != nil
		},
		warn: func(err error) {
			f.log.Warn("cannot read certificates that verify others; retrying", "namespace", n.namespace, "object", n.text, "err", err)
		},
	}
}

// authorityProblem returns what is wrong with an object that verifies the Pods or clients of a Service, which is served with
// earlier certificates.
func (in *inputs) authorityProblem(n svc.Name, s *service) string {
	for _, text := range s.spec.Authorities() {
		if a := in.authorities[objectName{n.Namespace, text}]; a != nil && a.problem != "" {
			who := "clients"
			if text == s.spec.BackendTLS.Authority {
				who = "Pods"
			}
			return fmt.Sprintf("cannot verify %s by %s: %s; its last certificates remain in use", who, text, a.problem)
		}
	}
	return ""
}
