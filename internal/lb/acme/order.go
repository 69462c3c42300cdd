package acme

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/acme"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	core "k8s.io/client-go/applyconfigurations/core/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// manager is who owns the fields of the Secrets: a field that another manager has set is a
// conflict, and is not replaced.
const manager = svc.ACMEAccountSecret

// apply writes the Secret of an item. Server-side apply creates it if it does not exist, with a right that only covers its name.
func (m *Manager) apply(ctx context.Context, o *owner, it *item, st *state) error {
	data := map[string][]byte{corev1.TLSCertKey: st.cert, corev1.TLSPrivateKeyKey: st.key}
	maps.Copy(data, st.challenges)
	annotations := map[string]string{svc.ACMEIssuedAnnotation: strconv.FormatBool(st.issued)}
	if st.failures > 0 {
		annotations[svc.ACMEFailuresAnnotation] = strconv.Itoa(st.failures)
		annotations[svc.ACMERetryAnnotation] = st.after.UTC().Format(time.RFC3339)
		annotations[svc.ACMEHostsAnnotation] = strings.Join(it.Hosts, ",")
	}
	s := core.Secret(it.Secret, o.name.Namespace).WithType(corev1.SecretTypeTLS).WithData(data).WithAnnotations(annotations).
		WithLabels(map[string]string{o.label: o.mark})
	_, err := m.o.Client.CoreV1().Secrets(o.name.Namespace).Apply(ctx, s, metav1.ApplyOptions{FieldManager: manager})
	return err
}

// order orders a certificate and stores it.
func (m *Manager) order(ctx context.Context, it *item, o *owner, st *state, granted *grant) time.Duration {
	limited, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	if err := m.apply(limited, o, it, st); err != nil { // what cannot be stored is not ordered
		granted.give(time.Now(), ofOrders, ofDomains, ofFailures)
		return m.cannotKeep(ctx, it, o, err)
	}
	next := *st
	err := m.obtain(limited, it, o, &next)
	if ctx.Err() != nil {
		return apiRetry
	}
	if err != nil {
		return m.failed(ctx, it, o, st, granted, err)
	}
	granted.give(time.Now(), ofFailures)
	m.budgetOf(o.name.Namespace).spend(time.Now(), false)
	next.issued, next.failures, next.after, next.challenges = true, 0, time.Time{}, nil
	it.unsaved = &next
	return m.store(ctx, it, o)
}

// store writes a certificate that has been issued.
func (m *Manager) store(ctx context.Context, it *item, o *owner) time.Duration {
	if err := m.apply(ctx, o, it, it.unsaved); err != nil {
		return m.cannotKeep(ctx, it, o, err)
	}
	until := "an unknown time"
	if leaf := it.unsaved.leaf(it.Hosts); leaf != nil {
		until = leaf.NotAfter.UTC().Format(time.RFC3339)
	}
	it.event, it.failures, it.unsaved = "", 0, nil
	m.setState(it, func(s *State) { *s = issuedUntil(until) })
	m.o.Event(o.object, corev1.EventTypeNormal, "ACMECertificateIssued",
		fmt.Sprintf("certificate for %s until %s, in the Secret %s", strings.Join(it.Hosts, ", "), until, it.Secret))
	return recheck
}

// failed reports why an order has failed, and keeps on the Secret when it is tried again.
func (m *Manager) failed(ctx context.Context, it *item, o *owner, st *state, granted *grant, err error) time.Duration {
	if errors.Is(err, errDenied) {
		granted.give(time.Now(), ofOrders, ofDomains, ofFailures)
		m.o.Log.Info("an order that replaces a certificate is made as any other", "service", o.name, "err", shorten(err))
		it.window.denied = true
		return 0
	}
	var pause *pauseError
	wait := time.Duration(0)
	if errors.As(err, &pause) {
		granted.give(time.Now(), ofOrders, ofDomains, ofFailures)
		wait = time.Until(pause.until)
	} else if limit, is := acme.RateLimit(err); is {
		// Nothing that this Service has done wrong: the account may have asked for too much.
		granted.give(time.Now(), ofDomains, ofFailures)
		wait = max(limit, retryAfter(1))
	} else {
		granted.give(time.Now(), ofDomains)
		m.budgetOf(o.name.Namespace).spend(time.Now(), true)
		st.failures = max(st.failures, it.failures) + 1
		it.failures, wait = st.failures, retryAfter(st.failures)
	}
	wait = max(wait, time.Second)
	st.challenges, st.after = nil, time.Now().Add(wait)
	text := shorten(err)
	m.warn(it, o, "ACMEOrderFailed", "cannot order a certificate for "+strings.Join(it.Hosts, ", ")+": "+text)
	m.o.Log.Warn("cannot order a certificate; retrying", "service", o.name, "after", wait, "err", text)
	if err := m.apply(ctx, o, it, st); err != nil {
		return max(wait, m.cannotKeep(ctx, it, o, err))
	}
	return wait
}

// maxError bounds what is repeated of an authority's words.
const maxError = 400

func shorten(err error) string {
	text := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, err.Error())
	return strings.ToValidUTF8(text[:min(len(text), maxError)], "")
}

// obtain puts a certificate for the hosts of it into st.
func (m *Manager) obtain(ctx context.Context, it *item, o *owner, st *state) error {
	c, err := m.client.get(ctx, m)
	if err != nil {
		return err
	}
	replaces := ""
	if st.leaf(it.Hosts) != nil {
		replaces = it.window.replaces()
	}
	order, err := m.newOrder(ctx, c, it.Hosts, replaces)
	if err != nil {
		m.client.rejected(c, err)
		return err
	}
	var open []*challenge
	for _, uri := range order.AuthzURLs {
		z, err := c.GetAuthorization(ctx, uri)
		if err != nil {
			return err
		}
		if z.Status != acme.StatusPending {
			continue
		}
		ch, err := prepare(c, z, uri, kindOf(it))
		if err != nil {
			return err
		}
		open = append(open, ch)
	}
	undo, err := m.present(ctx, it, o, st, open)
	defer undo()
	if err != nil {
		return err
	}
	for _, ch := range open {
		if _, err := c.Accept(ctx, ch.of); err != nil {
			return err
		}
	}
	for _, ch := range open { // the authority checks all of them at the same time
		if _, err := c.WaitAuthorization(ctx, ch.uri); err != nil {
			return err
		}
	}
	return m.finish(ctx, c, order, it.Hosts, st)
}

// finish fetches the certificate of an order that was authorized, for a new key.
func (m *Manager) finish(ctx context.Context, c *acme.Client, order *acme.Order, hosts []string, st *state) error {
	ready, err := c.WaitOrder(ctx, order.URI)
	if err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{DNSNames: hosts}, key)
	if err != nil {
		return err
	}
	chain, _, err := c.CreateOrderCert(ctx, ready.FinalizeURL, csr, true)
	if err != nil {
		// An authority that is not ready at once need not repeat the order's URL, without which the library cannot wait.
		done, waited := c.WaitOrder(ctx, order.URI)
		if waited != nil || done.Status != acme.StatusValid {
			return err
		}
		if chain, err = c.FetchCert(ctx, done.CertURL, true); err != nil {
			return err
		}
	}
	st.cert, st.key, err = encode(chain, key)
	return err
}

// authority is the client of the authority, with an account.
type authority struct {
	mu     sync.Mutex
	client *acme.Client
	// paused is not nil while no order asks for the account again.
	paused   *pauseError
	failures int
}

// get returns the client. The account is registered the first time; an authority that cannot be reached, or rejects the
// account, is not asked for each order.
func (a *authority) get(ctx context.Context, m *Manager) (*acme.Client, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client != nil {
		return a.client, nil
	}
	if a.paused != nil && time.Now().Before(a.paused.until) {
		return nil, a.paused
	}
	c, err := m.register(ctx)
	if err != nil {
		a.failures++
		a.paused = &pauseError{time.Now().Add(min(retryAfter(a.failures), time.Hour)), err}
		return nil, a.paused
	}
	a.client = c
	return c, nil
}

// rejected forgets the client c if the authority knows its account no more, or not as one that may order (RFC 8555,
// 6.7): the next order registers again.
func (a *authority) rejected(c *acme.Client, err error) {
	var answer *acme.Error
	if !errors.As(err, &answer) {
		return
	}
	switch strings.TrimPrefix(answer.ProblemType, errorType) {
	case "accountDoesNotExist", "unauthorized":
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.client == c {
			a.client = nil
		}
	}
}

// register returns a client whose account the authority knows.
func (m *Manager) register(ctx context.Context) (*acme.Client, error) {
	key, err := m.accountKey(ctx)
	if err != nil {
		m.o.Log.Warn("cannot read or make the key of the account for certificates", "secret", m.o.Account, "err", err)
		return nil, fmt.Errorf("the controller has no key for its account, the Secret %s", m.o.Account)
	}
	c := &acme.Client{
		Key: key, DirectoryURL: m.o.Directory, UserAgent: "fairlead",
		HTTPClient: &http.Client{Timeout: 30 * time.Second, Transport: m.transport},
	}
	account := &acme.Account{}
	if m.o.Email != "" {
		account.Contact = []string{"mailto:" + m.o.Email}
	}
	if b := m.o.Binding; b.KeyID != "" {
		account.ExternalAccountBinding = &acme.ExternalAccountBinding{KID: b.KeyID, Key: b.Key}
	}
	if _, err := c.Register(ctx, account, acme.AcceptTOS); err != nil && !errors.Is(err, acme.ErrAccountAlreadyExists) {
		return nil, err
	}
	return c, nil
}

// accountEntry is the entry of the account's Secret.
const accountEntry = "key"

// accountKey reads the key of the account, or makes one.
func (m *Manager) accountKey(ctx context.Context) (*ecdsa.PrivateKey, error) {
	secrets := m.o.Client.CoreV1().Secrets(m.o.Account.Namespace)
	s, err := secrets.Get(ctx, m.o.Account.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, err
		}
		_, text, err := encode(nil, key)
		if err != nil {
			return nil, err
		}
		_, err = secrets.Create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: m.o.Account.Namespace, Name: m.o.Account.Name}, Data: map[string][]byte{accountEntry: text},
		}, metav1.CreateOptions{})
		return key, err
	}
	if err != nil {
		return nil, err
	}
	return parseKey(s.Data[accountEntry])
}
