package acme

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
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

// serviceLabel is on a Secret that was made for a Service, and has its name.
const serviceLabel = "fairlead.dev/acme-service"

func isOurs(s *corev1.Secret, o *corev1.Service) bool { return s.Labels[serviceLabel] == o.Name }

// apply writes the Secret of a Service. Server-side apply creates it if it does not exist, with a right that only covers its name.
func (m *Manager) apply(ctx context.Context, o *corev1.Service, it *item, st *state) error {
	data := map[string][]byte{corev1.TLSCertKey: st.cert, corev1.TLSPrivateKeyKey: st.key}
	for host, text := range st.challenges {
		data[challengeEntry+host] = text
	}
	annotations := map[string]string{svc.ACMEIssuedAnnotation: strconv.FormatBool(st.issued)}
	if st.failures > 0 {
		annotations[svc.ACMEFailuresAnnotation] = strconv.Itoa(st.failures)
		annotations[svc.ACMERetryAnnotation] = st.after.UTC().Format(time.RFC3339)
		annotations[svc.ACMEHostsAnnotation] = strings.Join(it.hosts, ",")
	}
	s := core.Secret(it.secret, o.Namespace).WithType(corev1.SecretTypeTLS).WithData(data).WithAnnotations(annotations).
		WithLabels(map[string]string{serviceLabel: o.Name})
	_, err := m.o.Client.CoreV1().Secrets(o.Namespace).Apply(ctx, s, metav1.ApplyOptions{FieldManager: manager})
	return err
}

// order orders a certificate and stores it.
func (m *Manager) order(ctx context.Context, it *item, o *corev1.Service, st *state) time.Duration {
	limited, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	if err := m.apply(limited, o, it, st); err != nil { // what cannot be stored is not ordered
		return m.cannotKeep(ctx, it, o, err)
	}
	next := *st
	err := m.obtain(limited, it, o, &next)
	if ctx.Err() != nil {
		return apiRetry
	}
	if err != nil {
		return m.failed(ctx, it, o, st, err)
	}
	m.budgetOf(o.Namespace).spend(time.Now(), false)
	next.issued, next.failures, next.after, next.challenges = true, 0, time.Time{}, nil
	it.unsaved = &next
	return m.store(ctx, it, o)
}

// store writes a certificate that has been issued.
func (m *Manager) store(ctx context.Context, it *item, o *corev1.Service) time.Duration {
	if err := m.apply(ctx, o, it, it.unsaved); err != nil {
		return m.cannotKeep(ctx, it, o, err)
	}
	until := "an unknown time"
	if leaf := it.unsaved.leaf(it.hosts); leaf != nil {
		until = leaf.NotAfter.UTC().Format(time.RFC3339)
	}
	it.event, it.failures, it.unsaved = "", 0, nil
	m.o.Event(o, corev1.EventTypeNormal, "ACMECertificateIssued",
		fmt.Sprintf("certificate for %s until %s, in the Secret %s", strings.Join(it.hosts, ", "), until, it.secret))
	return recheck
}

// failed reports why an order has failed, and keeps on the Secret when it is tried again.
func (m *Manager) failed(ctx context.Context, it *item, o *corev1.Service, st *state, err error) time.Duration {
	var pause *pauseError
	wait := time.Duration(0)
	if errors.As(err, &pause) {
		wait = time.Until(pause.until)
	} else if limit, is := acme.RateLimit(err); is {
		// Nothing that this Service has done wrong: the account may have asked for too much.
		wait = max(limit, retryAfter(1))
	} else {
		m.budgetOf(o.Namespace).spend(time.Now(), true)
		st.failures = max(st.failures, it.failures) + 1
		it.failures, wait = st.failures, retryAfter(st.failures)
	}
	wait = max(wait, time.Second)
	st.challenges, st.after = nil, time.Now().Add(wait)
	text := shorten(err)
	m.warn(it, o, "ACMEOrderFailed", "cannot order a certificate for "+strings.Join(it.hosts, ", ")+": "+text)
	m.o.Log.Warn("cannot order a certificate; retrying", "service", svc.NameOf(o), "after", wait, "err", text)
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
func (m *Manager) obtain(ctx context.Context, it *item, o *corev1.Service, st *state) error {
	c, err := m.client.get(ctx, m)
	if err != nil {
		return err
	}
	order, err := c.AuthorizeOrder(ctx, acme.DomainIDs(it.hosts...))
	if err != nil {
		m.client.rejected(c, err)
		return err
	}
	pending := map[string]*acme.Challenge{} // by the URIs of authorizations
	st.challenges = map[string][]byte{}
	certs := map[string]tls.Certificate{}
	for _, uri := range order.AuthzURLs {
		z, err := c.GetAuthorization(ctx, uri)
		if err != nil {
			return err
		}
		if z.Status != acme.StatusPending {
			continue
		}
		for _, challenge := range z.Challenges {
			if challenge.Type == "tls-alpn-01" {
				pending[uri] = challenge
			}
		}
		if pending[uri] == nil {
			return fmt.Errorf("%s: the authority does not offer tls-alpn-01", z.Identifier.Value)
		}
		cert, err := c.TLSALPN01ChallengeCert(pending[uri].Token, z.Identifier.Value)
		if err != nil {
			return err
		}
		text, key, err := encode(cert.Certificate, cert.PrivateKey)
		if err != nil {
			return err
		}
		st.challenges[z.Identifier.Value], certs[z.Identifier.Value] = append(text, key...), cert
	}
	if len(pending) > 0 {
		if err := m.apply(ctx, o, it, st); err != nil {
			return err
		}
		m.awaitAnswers(ctx, o, certs)
	}
	for _, challenge := range pending {
		if _, err := c.Accept(ctx, challenge); err != nil {
			return err
		}
	}
	for uri := range pending { // the authority checks all of them at the same time
		if _, err := c.WaitAuthorization(ctx, uri); err != nil {
			return err
		}
	}
	return m.finish(ctx, c, order, it.hosts, st)
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

// awaitAnswers waits until the addresses of a Service answer challenges.
func (m *Manager) awaitAnswers(ctx context.Context, o *corev1.Service, certs map[string]tls.Certificate) {
	ctx, cancel := context.WithTimeout(ctx, m.o.Propagation)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		missing := false
		for _, in := range o.Status.LoadBalancer.Ingress {
			for host, cert := range certs {
				missing = missing || !answers(ctx, net.JoinHostPort(in.IP, "443"), host, cert)
			}
		}
		if !missing {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func answers(ctx context.Context, at, host string, cert tls.Certificate) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{ServerName: host, NextProtos: []string{acme.ALPNProto}, MinVersion: tls.VersionTLS12,
		InsecureSkipVerify: true}} //nolint:gosec // the certificate is compared below
	conn, err := d.DialContext(ctx, "tcp", at)
	if err != nil {
		return false
	}
	defer conn.Close()
	got := conn.(*tls.Conn).ConnectionState().PeerCertificates
	return len(got) > 0 && string(got[0].Raw) == string(cert.Certificate[0])
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
	switch strings.TrimPrefix(answer.ProblemType, "urn:ietf:params:acme:error:") {
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
	c := &acme.Client{Key: key, DirectoryURL: m.o.Directory, UserAgent: "fairlead", HTTPClient: &http.Client{
		Timeout: 30 * time.Second,
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{RootCAs: m.o.Roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout: 10 * time.Second, IdleConnTimeout: time.Minute, MaxIdleConnsPerHost: maxOrders,
		},
	}}
	account := &acme.Account{}
	if m.o.Email != "" {
		account.Contact = []string{"mailto:" + m.o.Email}
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
