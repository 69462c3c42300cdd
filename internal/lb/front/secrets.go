package front

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

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// secretUse is the purpose of a Secret that a Service of the proxied way names.
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
// others. The Front's mu guards it.
type namedSecret struct {
	stop context.CancelFunc
	// cert or credentials are the last valid ones, and problem is why the Secret cannot be used as it is now. No text has
	// a part of a key.
	cert        *tls.Certificate
	credentials *logship.Credentials
	problem     string
	// staple is for cert, and stapleProblem is why the one in the Secret is not used.
	staple        staple
	stapleProblem string
	// challenges and tokens answer a certificate authority by ACME.
	challenges map[string]*tls.Certificate
	tokens     map[string]string
}

func (t *namedSecret) end() { t.stop() }

// secret returns the TLS Secret that a Service names, nil if it is not followed yet.
func (in *inputs) secret(of svc.Name, name string) *namedSecret {
	return in.secrets[secretKey{svc.Name{Namespace: of.Namespace, Name: name}, forTLS}]
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

// followSecrets follows the Secrets that Services name, and no others.
func (f *Front) followSecrets(ctx context.Context, running *sync.WaitGroup) {
	f.mu.Lock()
	defer f.mu.Unlock()
	named := map[secretKey]bool{}
	for n, s := range f.services {
		for _, key := range secretsOf(n, s.spec) {
			if key.use == forTLS || f.upload != nil {
				named[key] = true
			}
		}
	}
	followNamed(f.secrets, named, func(key secretKey) *namedSecret { return f.followSecret(ctx, running, key) })
}

func (f *Front) followSecret(ctx context.Context, running *sync.WaitGroup, key secretKey) *namedSecret {
	t := &namedSecret{}
	ctx, t.stop = context.WithCancel(reflector.Silent(ctx))
	change := func(do func()) {
		f.changed(func() {
			do()
			f.rebuildLocked(key)
		})
	}
	set := func(s *corev1.Secret) {
		change(func() {
			if key.use == forLogs {
				t.credentials, t.problem = readLogSecret(s) // withdrawn credentials are not used any more
				return
			}
			t.setTLS(s)
		})
	}
	followObject(ctx, running, "lb-speaker/secret", reflector.From(f.client.CoreV1().Secrets(key.Namespace), byName(key.Name.Name)),
		oneObject[*corev1.Secret]{
			set:  set,
			gone: func(problem string) { change(func() { t.problem, t.credentials = problem, nil }) },
			kept: func() bool {
				f.mu.Lock()
				defer f.mu.Unlock()
				return t.cert != nil || t.credentials != nil
			},
			warn: func(err error) {
				f.log.Warn("cannot read a "+key.use.String()+"; retrying", "namespace", key.Namespace, "secret", key.Name.Name, "err", err)
			},
		})
	return t
}

// setTLS takes over a TLS Secret. A certificate that did not change keeps its pointer: another pointer restarts connections
// to Pods and their health checks. The caller holds the Front's mu.
func (t *namedSecret) setTLS(s *corev1.Secret) {
	cert, problem := readTLSSecret(s)
	if t.problem = problem; cert == nil {
		return
	}
	if t.cert == nil || !slices.EqualFunc(t.cert.Certificate, cert.Certificate, bytes.Equal) {
		t.cert = cert
	}
	t.staple, t.stapleProblem = readStaple(s, cert.Certificate, time.Now())
	t.challenges, t.tokens = acme.Challenges(s), acme.Tokens(s)
}

// rebuildLocked has the Services that use a TLS Secret built again.
func (f *Front) rebuildLocked(key secretKey) {
	if key.use != forTLS {
		return
	}
	for of, s := range f.services {
		if slices.Contains(secretsOf(of, s.spec), key) {
			s.built = nil
		}
	}
}

// readTLSSecret returns the certificate of a Secret, or why there is none.
func readTLSSecret(s *corev1.Secret) (cert *tls.Certificate, problem string) {
	if s.Type != corev1.SecretTypeTLS {
		return nil, fmt.Sprintf("it is of type %s, not %s", s.Type, corev1.SecretTypeTLS)
	}
	c, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	if err != nil { // the text of err might have parts of a key
		return nil, fmt.Sprintf("its entries %s and %s are not a certificate and its key", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	if c.Leaf == nil { // with GODEBUG x509keypairleaf=0
		if c.Leaf, err = x509.ParseCertificate(c.Certificate[0]); err != nil {
			return nil, "its certificate cannot be parsed"
		}
	}
	return &c, ""
}

// secretProblem returns what is wrong with the TLS Secrets of a Service that is served: an earlier certificate remains in
// use while the Secret has no valid one.
func (in *inputs) secretProblem(n svc.Name, s *service) string {
	for _, name := range s.spec.TLSSecrets() {
		t := in.secret(n, name)
		switch {
		case t == nil:
		case t.problem != "":
			return fmt.Sprintf("cannot use the TLS Secret %s: %s; its last certificate remains in use", name, t.problem)
		case t.cert != nil && in.now.After(t.cert.Leaf.NotAfter):
			return fmt.Sprintf("the certificate of the TLS Secret %s has expired", name)
		case t.stapleProblem != "":
			return fmt.Sprintf("cannot use the OCSP response (%s) of the TLS Secret %s: %s; it is not stapled", stapleEntry, name, t.stapleProblem)
		}
	}
	return ""
}
