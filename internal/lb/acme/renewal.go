package acme

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"golang.org/x/crypto/acme"
)

const (
	// askAgain is how long an answer about a renewal counts that does not say (RFC 9773, 4.3.3), and askSoonest and askLatest
	// bound what it says.
	askAgain   = 6 * time.Hour
	askSoonest = time.Minute
	askLatest  = 24 * time.Hour
	// askTimeout bounds a question about a renewal, and maxAnswer the bytes of an answer.
	askTimeout = 10 * time.Second
	maxAnswer  = 64 << 10
)

// renewal returns when a certificate must be replaced by itself: after two thirds of its lifetime.
func renewal(leaf *x509.Certificate) time.Time { return aged(leaf, 2, 3) }

// latest returns when a certificate is replaced at the latest, whatever the authority says.
func latest(leaf *x509.Certificate) time.Time { return aged(leaf, 11, 12) }

func aged(leaf *x509.Certificate, part, of time.Duration) time.Time {
	return leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / of * part)
}

// window is when an authority wants a certificate to be renewed (RFC 9773).
type window struct {
	id         string // of the certificate
	start, end time.Time
	at         time.Time // in it, by chance; zero if the authority has not said
	next       time.Time // of the next question
	failures   int
	// denied is true if the authority does not take the certificate as one that an order replaces.
	denied bool
}

// replaces returns the certificate that an order replaces as the authority has asked, empty if it has not.
func (w *window) replaces() string {
	if w == nil || w.at.IsZero() || w.denied {
		return ""
	}
	return w.id
}

// renewalOf returns when the certificate of a Service is renewed, and when to ask again for that.
func (m *Manager) renewalOf(ctx context.Context, it *item, leaf *x509.Certificate, now time.Time) (at, next time.Time) {
	id := certificateID(leaf)
	if it.window == nil || it.window.id != id {
		it.window = &window{id: id}
	}
	w := it.window
	if id != "" && !now.Before(w.next) {
		start, end, after, err := m.askRenewal(ctx, id)
		if err != nil {
			w.failures++
			w.next = now.Add(min(retryAfter(w.failures), askAgain))
			m.o.Log.Debug("the authority does not say when a certificate is to be renewed", "hosts", it.Hosts, "err", shorten(err))
		} else {
			w.failures, w.next = 0, now.Add(after)
			w.choose(start, end)
		}
	}
	if w.at.IsZero() {
		return renewal(leaf), w.next
	}
	return earlier(w.at, latest(leaf)), w.next
}

// choose takes a window over. In one that did not change the time stays.
func (w *window) choose(start, end time.Time) {
	if !w.start.Equal(start) || !w.end.Equal(end) {
		w.start, w.end = start, end
		w.at = start.Add(rand.N(end.Sub(start))) //nolint:gosec // no secret
	}
}

// certificateID returns what a certificate is named by (RFC 9773, 4.1), empty if it does not name its authority's key.
func certificateID(leaf *x509.Certificate) string {
	if len(leaf.AuthorityKeyId) == 0 || leaf.SerialNumber == nil || leaf.SerialNumber.Sign() <= 0 {
		return ""
	}
	serial := leaf.SerialNumber.Bytes()
	if serial[0]&0x80 != 0 { // as in DER
		serial = append([]byte{0}, serial...)
	}
	return base64.RawURLEncoding.EncodeToString(leaf.AuthorityKeyId) + "." + base64.RawURLEncoding.EncodeToString(serial)
}

// askRenewal asks the authority for the window of a certificate, and for how long the answer counts.
func (m *Manager) askRenewal(ctx context.Context, id string) (start, end time.Time, after time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := m.client.get(ctx, m)
	if err != nil {
		return start, end, 0, err
	}
	var directory struct {
		RenewalInfo string `json:"renewalInfo"`
	}
	if _, err = getJSON(ctx, c, m.o.Directory, &directory); err != nil {
		return start, end, 0, err
	}
	if directory.RenewalInfo == "" {
		return start, end, 0, errors.New("its directory has no renewalInfo")
	}
	var answer struct {
		SuggestedWindow struct{ Start, End time.Time } `json:"suggestedWindow"`
	}
	header, err := getJSON(ctx, c, directory.RenewalInfo+"/"+id, &answer)
	if err != nil {
		return start, end, 0, err
	}
	start, end = answer.SuggestedWindow.Start, answer.SuggestedWindow.End
	if start.IsZero() || !end.After(start) {
		return start, end, 0, fmt.Errorf("it suggests from %v to %v", start, end)
	}
	return start, end, min(max(readRetryAfter(header.Get("Retry-After"), time.Now()), askSoonest), askLatest), nil
}

// readRetryAfter returns what a field Retry-After says, askAgain if nothing.
func readRetryAfter(text string, now time.Time) time.Duration {
	if n, err := strconv.ParseUint(text, 10, 31); err == nil {
		return time.Duration(n) * time.Second //nolint:gosec // 31 bits
	}
	if at, err := http.ParseTime(text); err == nil {
		return at.Sub(now)
	}
	return askAgain
}

// getJSON gets what is at a URL of the authority.
func getJSON(ctx context.Context, c *acme.Client, url string, into any) (http.Header, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	answer, text, err := do(c, request)
	if err != nil {
		return nil, err
	}
	return answer.Header, json.Unmarshal(text, into)
}

// do sends a request, and returns the answer with its body. One without success is an *acme.Error.
func do(c *acme.Client, request *http.Request) (*http.Response, []byte, error) {
	request.Header.Set("User-Agent", c.UserAgent)
	answer, err := c.HTTPClient.Do(request)
	if err != nil {
		return nil, nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return nil, nil, err
	}
	if answer.StatusCode/100 != 2 {
		var problem struct{ Type, Detail string }
		_ = json.Unmarshal(text, &problem)
		return nil, nil, &acme.Error{
			StatusCode: answer.StatusCode, ProblemType: problem.Type, Detail: cmp.Or(problem.Detail, answer.Status), Header: answer.Header,
		}
	}
	return answer, text, nil
}

// errDenied is an order that the authority does not take as the replacement of a certificate. Another one is made at once.
var errDenied = errors.New("the authority does not replace that certificate")

// newOrder orders a certificate for hosts that replaces another one, unless that is empty (RFC 9773, 5), which package acme
// cannot.
func (m *Manager) newOrder(ctx context.Context, c *acme.Client, hosts []string, replaces string) (*acme.Order, error) {
	if replaces == "" {
		return c.AuthorizeOrder(ctx, acme.DomainIDs(hosts...))
	}
	order, err := replacingOrder(ctx, c, hosts, replaces)
	var problem *acme.Error
	if errors.As(err, &problem) {
		switch strings.TrimPrefix(problem.ProblemType, errorType) {
		case "rateLimited", "accountDoesNotExist", "badNonce":
		default: // "alreadyReplaced", and whatever else an authority says of a certificate that it does not know so
			return nil, fmt.Errorf("%w: %w", errDenied, err)
		}
	}
	return order, err
}

// errorType begins the types of an authority's errors.
const errorType = "urn:ietf:params:acme:error:"

// maxNonces is how often a request is repeated whose nonce was not good any more.
const maxNonces = 5

func replacingOrder(ctx context.Context, c *acme.Client, hosts []string, replaces string) (*acme.Order, error) {
	directory, err := c.Discover(ctx)
	if err != nil {
		return nil, err
	}
	var identifiers []map[string]string
	for _, host := range hosts {
		identifiers = append(identifiers, map[string]string{"type": "dns", "value": host})
	}
	body, err := json.Marshal(map[string]any{"identifiers": identifiers, "replaces": replaces})
	if err != nil {
		return nil, err
	}
	for try := 1; ; try++ {
		order, err := signedOrder(ctx, c, directory, body)
		var problem *acme.Error
		if try == maxNonces || !errors.As(err, &problem) || problem.ProblemType != errorType+"badNonce" {
			return order, err
		}
	}
}

// nonces gets one from the authority.
type nonces struct {
	ctx context.Context
	c   *acme.Client
	url string
}

// Nonce is of jose.NonceSource.
func (n nonces) Nonce() (string, error) {
	request, err := http.NewRequestWithContext(n.ctx, http.MethodHead, n.url, nil)
	if err != nil {
		return "", err
	}
	answer, _, err := do(n.c, request)
	if err != nil {
		return "", err
	}
	if nonce := answer.Header.Get("Replay-Nonce"); nonce != "" {
		return nonce, nil
	}
	return "", errors.New("the authority gives no nonce")
}

// signedOrder posts a new order (RFC 8555, 7.4).
func signedOrder(ctx context.Context, c *acme.Client, directory acme.Directory, body []byte) (*acme.Order, error) {
	key := jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: c.Key, KeyID: string(c.KID)}}
	options := (&jose.SignerOptions{NonceSource: nonces{ctx, c, directory.NonceURL}}).WithHeader("url", directory.OrderURL)
	signer, err := jose.NewSigner(key, options)
	if err != nil {
		return nil, err
	}
	signed, err := signer.Sign(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, directory.OrderURL, bytes.NewBufferString(signed.FullSerialize()))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/jose+json")
	answer, text, err := do(c, request)
	if err != nil {
		return nil, err
	}
	var order struct {
		Status, Finalize string
		Authorizations   []string
	}
	if err := json.Unmarshal(text, &order); err != nil {
		return nil, err
	}
	return &acme.Order{
		URI: answer.Header.Get("Location"), Status: order.Status, AuthzURLs: order.Authorizations, FinalizeURL: order.Finalize,
	}, nil
}
