package lb

import (
	"context"
	"crypto/x509"
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// objectName names a Secret or a ConfigMap: secret/NAME or configmap/NAME of a namespace.
type objectName struct{ namespace, text string }

// podAuthority is an object with the certificates by which Pods are verified. As a TLS Secret it is watched by its name.
type podAuthority struct {
	stop context.CancelFunc
	// pool has the last ones that could be used, and problem is why the object cannot be used as it is now.
	pool    *x509.CertPool
	problem string
}

// authorityEntry has the certificates, as in Secrets and ConfigMaps of cert-manager and of Kubernetes.
const authorityEntry = corev1.ServiceAccountRootCAKey

// followAuthorities follows the objects that are named, and no others.
func (p *proxying) followAuthorities(ctx context.Context, running *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	named := map[objectName]bool{}
	for n, v := range p.services {
		if v.spec != nil && v.spec.BackendTLS.Authority != "" {
			named[objectName{n.Namespace, v.spec.BackendTLS.Authority}] = true
		}
	}
	for n, a := range p.roots {
		if !named[n] {
			a.stop()
			delete(p.roots, n)
		}
	}
	for n := range named {
		if p.roots[n] == nil {
			p.roots[n] = p.followAuthority(ctx, running, n)
		}
	}
}

func (p *proxying) followAuthority(ctx context.Context, running *sync.WaitGroup, n objectName) *podAuthority {
	a := &podAuthority{}
	ctx, a.stop = context.WithCancel(reflector.Quiet(ctx))
	change := func(text []byte, problem string) {
		pool := x509.NewCertPool()
		if problem == "" && !pool.AppendCertsFromPEM(text) {
			problem = "its entry " + authorityEntry + " has no certificate"
		}
		p.changed(func() {
			if a.problem = problem; problem == "" && !pool.Equal(a.pool) { // an equal one would restart health checks
				a.pool = pool
			}
			for of, v := range p.services {
				if v.spec != nil && n == (objectName{of.Namespace, v.spec.BackendTLS.Authority}) {
					v.built = nil
				}
			}
		})
	}
	kind, name, _ := strings.Cut(n.text, "/")
	core := p.client.CoreV1()
	if kind == "configmap" {
		followObject(ctx, running, "lb-speaker/authority", reflector.From(core.ConfigMaps(n.namespace), byName(name)),
			authorityObject(p, a, n, change, func(o *corev1.ConfigMap) []byte { return []byte(o.Data[authorityEntry]) }))
		return a
	}
	followObject(ctx, running, "lb-speaker/authority", reflector.From(core.Secrets(n.namespace), byName(name)),
		authorityObject(p, a, n, change, func(o *corev1.Secret) []byte { return o.Data[authorityEntry] }))
	return a
}

// authorityObject calls change with the entry of an object.
func authorityObject[T any](p *proxying, a *podAuthority, n objectName, change func(text []byte, problem string),
	entry func(T) []byte) oneObject[T] {
	return oneObject[T]{
		set:  func(o T) { change(entry(o), "") },
		gone: func(problem string) { change(nil, problem) },
		kept: func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return a.pool != nil
		},
		warn: func(err error) {
			p.log.Warn("cannot read by what Pods are verified; retrying", "namespace", n.namespace, "object", n.text, "err", err)
		},
	}
}

// authorityProblem returns what is wrong with the object by which the Pods of a Service are verified: an older one goes on.
func (p *proxying) authorityProblem(n svc.Name, v *proxiedService) string {
	a := p.roots[objectName{n.Namespace, v.spec.BackendTLS.Authority}]
	if a == nil || a.problem == "" {
		return ""
	}
	return fmt.Sprintf("cannot verify Pods by %s: %s; its last certificates go on", v.spec.BackendTLS.Authority, a.problem)
}
