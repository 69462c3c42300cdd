package lb

import (
	"context"
	"crypto/x509"
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

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
	logged := "" // of observed, which is called for one request after the other
	observed := func(err error) {
		if ctx.Err() != nil {
			return
		}
		problem := readProblem(err)
		if problem != "" && problem != logged {
			p.log.Warn("cannot read by what Pods are verified; retrying", "namespace", n.namespace, "object", n.text, "err", err)
			p.mu.Lock()
			has := a.pool != nil
			p.mu.Unlock()
			if !has {
				change(nil, problem)
			}
		}
		logged = problem
	}
	kind, name, _ := strings.Cut(n.text, "/")
	one := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()}
	core := p.client.CoreV1()
	if kind == "configmap" {
		from := reflector.From(core.ConfigMaps(n.namespace), one).Observed(observed)
		to := authoritySink(change, func(o *corev1.ConfigMap) []byte { return []byte(o.Data[authorityEntry]) })
		running.Go(func() { reflector.Run(ctx, "lb-speaker/authority", from, to) })
		return a
	}
	from := reflector.From(core.Secrets(n.namespace), one).Observed(observed)
	to := authoritySink(change, func(o *corev1.Secret) []byte { return o.Data[authorityEntry] })
	running.Go(func() { reflector.Run(ctx, "lb-speaker/authority", from, to) })
	return a
}

// authoritySink returns what calls change with the entry of the object.
func authoritySink[T any](change func(text []byte, problem string), entry func(T) []byte) reflector.Sink[T] {
	return reflector.Sink[T]{
		Replace: func(list []T) {
			if len(list) == 0 {
				change(nil, "it does not exist")
				return
			}
			change(entry(list[0]), "")
		},
		Set:    func(o T) { change(entry(o), "") },
		Delete: func(T) { change(nil, "it was deleted") },
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
