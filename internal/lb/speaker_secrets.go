package lb

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// tlsSecret is a TLS Secret that a Service of the proxied way names. It is watched by its name: a node has no
// right to list others.
type tlsSecret struct {
	stop context.CancelFunc
	// cert is the last one that could be used, and problem is why the Secret cannot be used as it is now. Neither
	// that nor anything else has a part of the key.
	cert    *tls.Certificate
	problem string
}

// followSecrets follows the Secrets that are named, and no others.
func (p *proxying) followSecrets(ctx context.Context, running *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	named := map[svc.Name]bool{}
	for n, v := range p.services {
		if v.spec == nil {
			continue
		}
		for _, name := range v.spec.Certificates {
			named[svc.Name{Namespace: n.Namespace, Name: name}] = true
		}
	}
	for n, t := range p.secrets {
		if !named[n] {
			t.stop()
			delete(p.secrets, n)
		}
	}
	for n := range named {
		if p.secrets[n] == nil {
			p.secrets[n] = p.followSecret(ctx, running, n)
		}
	}
}

func (p *proxying) followSecret(ctx context.Context, running *sync.WaitGroup, n svc.Name) *tlsSecret {
	t := &tlsSecret{}
	ctx, t.stop = context.WithCancel(reflector.Quiet(ctx))
	change := func(cert *tls.Certificate, problem string) {
		p.changed(func() {
			if t.problem = problem; cert != nil {
				t.cert = cert
			}
			for of, v := range p.services {
				if of.Namespace == n.Namespace && v.spec != nil && slices.Contains(v.spec.Certificates, n.Name) {
					v.built = nil
				}
			}
		})
	}
	set := func(s *corev1.Secret) { change(readTLSSecret(s)) }
	sink := reflector.Sink[*corev1.Secret]{
		Replace: func(list []*corev1.Secret) {
			if len(list) == 0 {
				change(nil, "it does not exist")
				return
			}
			set(list[0])
		},
		Set:    set,
		Delete: func(*corev1.Secret) { change(nil, "it was deleted") },
	}
	from := reflector.From(p.client.CoreV1().Secrets(n.Namespace),
		metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", n.Name).String()})
	logged := "" // of observed, which is called for one request after the other
	observed := from.Observed(func(err error) {
		if ctx.Err() != nil {
			return
		}
		problem := readProblem(err)
		if problem != "" && problem != logged {
			p.log.Warn("cannot read a TLS Secret; retrying", "namespace", n.Namespace, "secret", n.Name, "err", err)
		}
		logged = problem
		p.mu.Lock()
		has := t.cert != nil
		p.mu.Unlock()
		if problem != "" && !has {
			change(nil, problem)
		}
	})
	running.Go(func() { reflector.Run(ctx, "lb-speaker/secret", observed, sink) })
	return t
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
	for _, name := range v.spec.Certificates {
		t := p.secrets[svc.Name{Namespace: n.Namespace, Name: name}]
		switch {
		case t == nil:
		case t.problem != "":
			return fmt.Sprintf("cannot use the TLS Secret %s: %s; its last certificate goes on", name, t.problem)
		case t.cert != nil && time.Now().After(t.cert.Leaf.NotAfter):
			return fmt.Sprintf("the certificate of the TLS Secret %s has expired", name)
		}
	}
	return ""
}
