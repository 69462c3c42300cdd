package tunnel

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/observer"
	"github.com/fairlead/fairlead/internal/testbed"
)

const account = "system:serviceaccount:kube-system:fairlead-proxy"

// reviewer is an API server that knows tokens: "ACCOUNT NODE AUDIENCE".
type reviewer struct{ asked atomic.Int32 }

func (v *reviewer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/apis/authentication.k8s.io/v1/tokenreviews" {
		http.NotFound(w, r)
		return
	}
	v.asked.Add(1)
	review := &authv1.TokenReview{}
	if err := json.NewDecoder(r.Body).Decode(review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	switch parts := strings.Split(review.Spec.Token, "|"); {
	case review.Spec.Token == "broken":
		http.Error(w, "no etcd", http.StatusInternalServerError)
		return
	case len(parts) == 3:
		review.Status = authv1.TokenReviewStatus{Authenticated: true, Audiences: []string{parts[2]}}
		review.Status.User.Username = parts[0]
		if parts[1] != "" {
			review.Status.User.Extra = map[string]authv1.ExtraValue{"authentication.kubernetes.io/node-name": {parts[1]}}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	review.TypeMeta = metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"}
	_ = json.NewEncoder(w).Encode(review)
}

func newClient(t *testing.T, h http.Handler) kubernetes.Interface {
	t.Helper()
	api := httptest.NewServer(h)
	t.Cleanup(api.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: api.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// relayOn is a Server that runs until the test ends, or stop is called.
type relayOn struct {
	*Server

	where    published
	stop     func()
	reviewer *reviewer
}

func startRelay(t *testing.T, change ...func(*Server)) *relayOn {
	t.Helper()
	v := &reviewer{}
	s, err := NewServer(newClient(t, v), "kube-system", "fairlead-proxy", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(s)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	out := &relayOn{Server: s, where: published{address: l.Addr().String(), certificate: s.text}, reviewer: v}
	stopped := false
	out.stop = func() {
		cancel()
		if !stopped {
			stopped = true
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(out.stop)
	return out
}

// newNode returns a node that shows a token, and has one flow.
func newNode(t *testing.T, name, token string) *Node {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ring := hubble.NewRing(8)
	at := netip.MustParseAddrPort("192.0.2.1:80")
	ring.Add(hubble.Flow{Time: time.Now(), Source: at, Destination: at, From: hubble.World, To: hubble.World})
	n := NewNode(nil, "kube-system", file, hubble.Handler(hubble.NewObserver(name, "1.2.3", ring)), slog.New(slog.DiscardHandler))
	n.retry = 10 * time.Millisecond
	return n
}

// run keeps a node connected until the test ends.
func run(t *testing.T, n *Node) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); n.keep(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func tokenOf(node string) string { return account + "|" + node + "|" + Audience }

// flowsOf is how many flows a node has.
func (r *relayOn) flowsOf(ctx context.Context, node string) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	answer, err := r.Ask(ctx, node, "ServerStatus", nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = answer.Close() }()
	m := &observer.ServerStatusResponse{}
	err = hubble.ReadAnswer(answer, hubble.MaxAnswer, func(text []byte) error { return proto.Unmarshal(text, m) })
	return m.GetNumFlows(), err
}

func (r *relayOn) has(t *testing.T, node string) {
	t.Helper()
	testbed.Until(t, "an answer of "+node, func() error {
		n, err := r.flowsOf(t.Context(), node)
		if err == nil && n != 1 {
			err = fmt.Errorf("%d flows", n)
		}
		return err
	})
}

func address(r *relayOn, node string) string {
	return r.Address(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}})
}

// Nodes answer over their connections, and connect to another relay when there is one.
func TestNodesAnswer(t *testing.T) {
	first, second := startRelay(t), startRelay(t)
	one, two := newNode(t, "node-1", tokenOf("node-1")), newNode(t, "node-2", tokenOf("node-2"))
	for _, n := range []*Node{one, two} {
		n.set(first.where)
		run(t, n)
	}
	first.has(t, "node-1")
	first.has(t, "node-2")
	if a := address(first, "node-1"); !strings.HasPrefix(a, "127.0.0.1:") {
		t.Errorf("the address of node-1 is %q", a)
	}
	_, err := first.flowsOf(t.Context(), "node-3")
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "not connected") {
		t.Errorf("a node that is not connected: %v", err)
	}
	first.stop()
	two.set(second.where)
	second.has(t, "node-2")
	one.set(second.where)
	second.has(t, "node-1")
	if address(first, "node-1") != "" {
		t.Error("a relay that has ended has nodes")
	}
}

// A node ends while the relay goes on, and the relay knows.
func TestNodeEnds(t *testing.T) {
	r := startRelay(t)
	n := newNode(t, "node-1", tokenOf("node-1"))
	n.set(r.where)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); n.keep(ctx) }()
	r.has(t, "node-1")
	cancel()
	testbed.Receive(t, "the end of the node", ended)
	testbed.Until(t, "the end of its connection", func() error {
		if a := address(r, "node-1"); a != "" {
			return errors.New(a)
		}
		return nil
	})
}

// Connections do not last for ever: a node shows a new token.
func TestTokensAreShownAgain(t *testing.T) {
	r := startRelay(t, func(s *Server) { s.age = 20 * time.Millisecond })
	n := newNode(t, "node-1", tokenOf("node-1"))
	n.set(r.where)
	run(t, n)
	testbed.Until(t, "three reviews", func() error {
		if asked := r.reviewer.asked.Load(); asked < 3 {
			return fmt.Errorf("%d", asked)
		}
		return nil
	})
}

// The last connection of a node counts.
func TestReplaced(t *testing.T) {
	r := startRelay(t)
	ended := make(chan struct{})
	first := newNode(t, "node-1", tokenOf("node-1"))
	go func() {
		defer close(ended)
		if ok, err := first.connect(t.Context(), r.where, nil); !ok || err != nil {
			t.Error(ok, err)
		}
	}()
	r.has(t, "node-1")
	before := address(r, "node-1")
	second := newNode(t, "node-1", tokenOf("node-1"))
	second.set(r.where)
	run(t, second)
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("the first connection goes on")
	}
	r.has(t, "node-1")
	if now := address(r, "node-1"); now == before {
		t.Errorf("the address is still %s", now)
	}
}

// Whoever is not a proxy of a node is not asked.
func TestRefused(t *testing.T) {
	r := startRelay(t)
	for token, want := range map[string]string{
		"stolen": "401 Unauthorized: the API server does not accept the token",
		"broken": "503 Service Unavailable: the API server does not review the token",
		account + "|node-1|https://kubernetes.default.svc":        "401 Unauthorized: the token is not for the audience fairlead-hubble-relay",
		"system:serviceaccount:shop:web|node-1|" + Audience:       "401 Unauthorized: the token is that of system:serviceaccount:shop:web",
		"system:serviceaccount:shop:fairlead-proxy|n|" + Audience: "want one of " + account,
		account + "||" + Audience:                                 "401 Unauthorized: the token names no node",
		"":                                                        "has no token",
		"a b":                                                     "has no token",
	} {
		ok, err := newNode(t, "node-1", token).connect(t.Context(), r.where, nil)
		if ok || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("token %q: %v, %v; want %s", token, ok, err, want)
		}
	}
	if address(r, "node-1") != "" {
		t.Error("a node without a token is asked")
	}
}

// Requests of others than nodes get an answer that says so, and cannot reach a node.
func TestOtherRequests(t *testing.T) {
	r := startRelay(t)
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the test's own server
	}}
	for _, path := range []string{"/", "/hubble/", "/observer.Observer/GetFlows", "/hubble/GetFlows"} {
		answer, err := client.Get("https://" + r.where.address + path)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if err != nil || answer.StatusCode != http.StatusNotFound || !strings.Contains(string(text), "only nodes") {
			t.Errorf("%s: %v, %s: %s", path, err, answer.Status, text)
		}
	}
	if n := r.reviewer.asked.Load(); n != 0 {
		t.Errorf("%d tokens were reviewed", n)
	}
}

// A node shows its token only to the relay whose certificate is published.
func TestOtherRelay(t *testing.T) {
	var asked atomic.Int32
	other := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	t.Cleanup(other.Close)
	other.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	where := startRelay(t).where
	where.address = other.Listener.Addr().String()
	var wrong *tls.CertificateVerificationError
	if ok, err := newNode(t, "node-1", tokenOf("node-1")).connect(t.Context(), where, nil); ok || !errors.As(err, &wrong) {
		t.Errorf("another certificate: %v, %v", ok, err)
	}
	if ok, err := newNode(t, "node-1", tokenOf("node-1")).connect(t.Context(), published{address: where.address}, nil); ok || err == nil {
		t.Errorf("no certificate: %v, %v", ok, err)
	}
	if asked.Load() != 0 {
		t.Error("the other relay got a request")
	}
}

// What a node with a valid token does wrong is an error about this node, and never ends the relay.
func TestHostileNode(t *testing.T) {
	r := startRelay(t)
	for name, answer := range map[string]http.HandlerFunc{
		"status":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) },
		"header":  func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", strings.Repeat("x", 4<<20)) },
		"end":     func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"message": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("\xff\xff\xff\xff\xff\x01")) },
		"moved": func(w http.ResponseWriter, q *http.Request) {
			http.Redirect(w, q, "http://127.0.0.1:1/", http.StatusFound)
		},
	} {
		n := newNode(t, name, tokenOf(name))
		n.answer = answer
		n.set(r.where)
		run(t, n)
		testbed.Until(t, name+" is connected", func() error {
			if address(r, name) == "" {
				return errors.New("it is not")
			}
			return nil
		})
		if _, err := r.flowsOf(t.Context(), name); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	silent := newNode(t, "silent", tokenOf("silent"))
	conn, err := silent.dial(t.Context(), r.where) // and does not answer
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	testbed.Until(t, "it is connected", func() error {
		if address(r, "silent") == "" {
			return errors.New("it is not")
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if answer, err := r.Ask(ctx, "silent", "ServerStatus", nil); status.Code(err) != codes.Unavailable {
		t.Errorf("a node that says nothing: %v, %v", answer, err)
	}
	good := newNode(t, "good", tokenOf("good"))
	good.set(r.where)
	run(t, good)
	r.has(t, "good")
}
