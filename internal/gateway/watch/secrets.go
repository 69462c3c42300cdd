package watch

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/basic"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// secret is a Secret that a listener names. It is followed by its name: a node has no right to list others.
type secret struct {
	stop    context.CancelFunc
	cert    *tls.Certificate // nil if it cannot be used
	answers acme.Answers
	users   map[basic.Source]*basic.Users
	listed  bool
}

// followSecrets follows the Secrets that fronts name, and no others. The caller holds mu.
func (w *Watch) followSecrets(ctx context.Context, running *sync.WaitGroup) {
	for n := range w.changedSecrets {
		t, named := w.secrets[n], len(w.secretUsers[n]) > 0
		if named && t == nil {
			w.followSecret(ctx, running, n)
		} else if !named && t != nil {
			t.stop()
			if !t.listed {
				w.pending--
			}
			delete(w.secrets, n)
			if _, known := w.objects.Secrets[n]; known {
				delete(w.objects.Secrets, n)
				w.dirtySecret(n)
			}
		}
	}
	clear(w.changedSecrets)
}

// dirtySecret has the fronts that name a Secret built again. The caller holds mu.
func (w *Watch) dirtySecret(n svc.Name) {
	w.secretChanges++
	for f := range w.secretUsers[n] {
		if f.ingresses {
			w.dirtyIngresses[f.Name] = true
		} else {
			w.dirty[f.Name] = true
		}
	}
}

func (w *Watch) followSecret(ctx context.Context, running *sync.WaitGroup, n svc.Name) {
	t := &secret{}
	w.secrets[n] = t
	w.pending++
	ctx, t.stop = context.WithCancel(reflector.Quiet(ctx))
	change := func(s *corev1.Secret) {
		w.mu.Lock()
		if w.secrets[n] == t {
			if !t.listed {
				t.listed = true
				w.pending--
			}
			have, had := t.cert, t.users
			t.cert, t.users, t.answers = nil, nil, acme.Answers{}
			delete(w.objects.Secrets, n)
			if s != nil {
				cert, problem := ReadTLS(s)
				if have != nil && cert != nil && slices.EqualFunc(have.Certificate, cert.Certificate, bytes.Equal) {
					cert = have // another pointer would end connections to backends
				}
				t.cert, t.answers = cert, acme.AnswersOf(s)
				found := gateway.Secret{Problem: problem}
				t.users, found.NoFile, found.NoMap = readUsers(n, s, had)
				w.objects.Secrets[n] = found
			}
			w.dirtySecret(n)
		}
		w.mu.Unlock()
		w.o.Changed()
	}
	unread := func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return !t.listed
	}
	followOne(ctx, running, "gateway/secret", w.o.Client.CoreV1().Secrets(n.Namespace), n.Name, unread, change)
}

// readUsers returns the names and passwords of a Secret in either form, or why there are none. Ones that have not changed stay.
func readUsers(n svc.Name, s *corev1.Secret, had map[basic.Source]*basic.Users) (all map[basic.Source]*basic.Users, noFile, noMap string) {
	all = map[basic.Source]*basic.Users{}
	if s.Type == corev1.SecretTypeTLS {
		wrong := fmt.Sprintf("it is of type %s", s.Type)
		return all, wrong, wrong
	}
	add := func(from basic.Source, u *basic.Users) {
		if was := had[from]; u.Equal(was) {
			u = was
		}
		if u != nil {
			all[from] = u
		}
	}
	file, noFile := basic.ReadFile(s.Data[basic.Entry])
	if _, has := s.Data[basic.Entry]; !has {
		noFile = "it has no entry " + basic.Entry
	}
	add(basic.Source{Secret: n}, file)
	byName, noMap := basic.ReadMap(s.Data)
	add(basic.Source{Secret: n, Map: true}, byName)
	return all, noFile, noMap
}

// ReadSecret returns what fronts ask of a Secret.
func ReadSecret(s *corev1.Secret) gateway.Secret {
	var out gateway.Secret
	_, out.Problem = ReadTLS(s)
	_, out.NoFile, out.NoMap = readUsers(svc.NameOf(s), s, nil)
	return out
}

// ReadTLS returns the certificate of a Secret, or why there is none.
func ReadTLS(s *corev1.Secret) (cert *tls.Certificate, problem string) {
	if s.Type != corev1.SecretTypeTLS {
		return nil, fmt.Sprintf("it is of type %s, not %s", s.Type, corev1.SecretTypeTLS)
	}
	c, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	if err != nil { // the text of err might have parts of a key
		return nil, fmt.Sprintf("its entries %s and %s are not a certificate and its key", corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	if c.Leaf == nil {
		if c.Leaf, err = x509.ParseCertificate(slices.Clone(c.Certificate[0])); err != nil {
			return nil, "its certificate cannot be parsed"
		}
	}
	return &c, ""
}
