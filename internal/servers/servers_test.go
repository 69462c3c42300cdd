package servers

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/testbed"
)

// valve is a listener whose connections can be made silent: nothing comes or goes, without
// an error on either side.
type valve struct {
	net.Listener
	mu   sync.Mutex
	open chan struct{} // closed while bytes pass
}

type valveConn struct {
	net.Conn
	v *valve
}

func newValve(t *testing.T, at string) *valve {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	v := &valve{Listener: l, open: make(chan struct{})}
	close(v.open)
	return v
}

func (v *valve) shut() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.open = make(chan struct{})
}

func (v *valve) reopen() {
	v.mu.Lock()
	defer v.mu.Unlock()
	close(v.open)
}

func (v *valve) pass() {
	v.mu.Lock()
	open := v.open
	v.mu.Unlock()
	<-open
}

func (v *valve) Accept() (net.Conn, error) {
	c, err := v.Listener.Accept()
	return valveConn{c, v}, err
}

func (c valveConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.v.pass()
	return n, err
}

func (c valveConn) Write(p []byte) (int, error) {
	c.v.pass()
	return c.Conn.Write(p)
}

// apiServer answers with its address, and keeps watches open.
type apiServer struct {
	*httptest.Server
	valve *valve
	at    string
}

func startServer(t *testing.T, at string) *apiServer {
	t.Helper()
	s := &apiServer{valve: newValve(t, at)}
	s.at = s.valve.Addr().String()
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, s.at)
		if r.URL.Query().Get("watch") != "" {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}))
	s.Listener.Close()
	s.Listener, s.EnableHTTP2 = s.valve, true
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	s.StartTLS()
	t.Cleanup(s.end)
	return s
}

// end ends the server as a kill does.
func (s *apiServer) end() {
	s.Listener.Close()
	s.CloseClientConnections()
}

// startBalancer returns a client of servers, the first of which was given.
func startBalancer(t *testing.T, file string, list ...*apiServer) (*Balancer, *http.Client) {
	t.Helper()
	cfg := &rest.Config{Host: list[0].URL, TLSClientConfig: rest.TLSClientConfig{
		CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: list[0].Certificate().Raw}),
	}}
	var more []string
	for _, s := range list[1:] {
		more = append(more, s.URL)
	}
	b, err := New(Options{Node: "node", Config: cfg, More: more, File: file, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	b.Use(cfg)
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = b.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		client.CloseIdleConnections()
	})
	return b, client
}

// get returns the address of the server that answers a request, and the rest of the answer.
func get(t *testing.T, c *http.Client, query string) (string, io.ReadCloser, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://anywhere/"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req) //nolint:bodyclose // the caller does
	if err != nil {
		return "", nil, err
	}
	at := make([]byte, 64)
	n, err := resp.Body.Read(at)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", nil, err
	}
	return string(at[:n]), resp.Body, nil
}

func must(t *testing.T, c *http.Client, query string) (string, io.ReadCloser) {
	t.Helper()
	at, body, err := get(t, c, query)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { body.Close() })
	return at, body
}

func find(list []*apiServer, at string) *apiServer {
	return list[slices.IndexFunc(list, func(s *apiServer) bool { return s.at == at })]
}

// A server that ends, and one that falls silent, are left: watches end as if the server had
// ended them, requests go on, and a server without another one to stand in for it is waited for.
func TestServersAreLeft(t *testing.T) {
	list := []*apiServer{startServer(t, "127.0.0.1:0"), startServer(t, "127.0.0.1:0"), startServer(t, "127.0.0.1:0")}
	b, client := startBalancer(t, "", list...)
	testbed.Until(t, "all servers to be probed", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if n := len(b.order(func(s *server) bool { return s.state == up })); n < len(list) {
			return fmt.Errorf("%d are up", n)
		}
		return nil
	})
	first, watch := must(t, client, "?watch=1")
	find(list, first).end()
	if _, err := watch.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the watch ended with %v", err)
	}
	second, watch := must(t, client, "?watch=1")
	if second == first {
		t.Fatal("a server that has ended answers")
	}
	find(list, second).valve.shut()
	if _, err := watch.Read(make([]byte, 1)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the watch of a silent server ended with %v", err)
	}
	third, watch := must(t, client, "?watch=1")
	if third == first || third == second {
		t.Fatal("a server that is silent answers")
	}
	// Silent, too, and no other answers.
	find(list, third).valve.shut()
	testbed.Until(t, "silence", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if s := b.all[third]; len(s.conns) > 0 && !s.heard().IsZero() && time.Since(s.heard()) < silence+3*checkEvery {
			return errors.New("not yet")
		}
		return nil
	})
	find(list, third).valve.reopen()
	if at, _ := must(t, client, ""); at != third {
		t.Errorf("%s answers", at)
	}
	find(list, third).end()
	if _, err := watch.Read(make([]byte, 1)); err == nil {
		t.Error("the last watch goes on")
	}
	find(list, second).valve.reopen()
	testbed.Until(t, "the silent server to be used again", func() error {
		at, body, err := get(t, client, "")
		if err != nil {
			return err
		}
		body.Close()
		if at != second {
			return errors.New(at)
		}
		return nil
	})
}

// While no server answers requests fail as if the connection were refused, watches wait,
// and the first server that is back gets them. The next start knows what was learned.
func TestWithoutAnyServer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "servers.json")
	s := startServer(t, "127.0.0.1:0")
	b, client := startBalancer(t, file, s)
	must(t, client, "")
	other := startServer(t, "127.0.0.1:0")
	_, port, _ := net.SplitHostPort(other.at)
	number, _ := strconv.ParseInt(port, 10, 32)
	sink := b.Follow(reflector.Sink[*discoveryv1.EndpointSlice]{
		Replace: func([]*discoveryv1.EndpointSlice) {}, Set: func(*discoveryv1.EndpointSlice) {}, Delete: func(*discoveryv1.EndpointSlice) {},
	})
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"},
		},
		Ports:     []discoveryv1.EndpointPort{{Name: new("https"), Port: new(int32(number))}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"127.0.0.1"}}},
	}
	foreign := slice.DeepCopy()
	foreign.Namespace, foreign.Endpoints[0].Addresses = metav1.NamespacePublic, []string{"192.0.2.1"}
	sink.Replace([]*discoveryv1.EndpointSlice{slice, foreign})
	sink.Delete(slice) // no server at all is not what this node sees
	s.end()
	testbed.Until(t, "the server that was learned", func() error {
		at, body, err := get(t, client, "")
		if err == nil {
			body.Close()
		}
		if at != other.at {
			return fmt.Errorf("%s answers, %v", at, err)
		}
		return nil
	})
	other.end()
	testbed.Until(t, "no server", func() error {
		if _, _, err := get(t, client, ""); !errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("the error is %w", err)
		}
		return nil
	})
	testbed.Until(t, "watches to wait", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.outage.IsZero() || time.Since(b.outage) < failFast {
			return errors.New("requests fail at once")
		}
		return nil
	})
	answered := make(chan string, 1)
	go func() {
		at, _, err := get(t, client, "?watch=1") //nolint:bodyclose // ends with the server
		answered <- fmt.Sprint(at, err)
	}()
	again := startServer(t, other.at)
	if got := <-answered; got != fmt.Sprint(again.at, nil) {
		t.Errorf("the watch that waited: %s", got)
	}
	next, err := New(Options{Node: "node", Config: &rest.Config{Host: "https://127.0.0.1:1"}, File: file, Log: slog.New(slog.DiscardHandler)})
	if err != nil || !slices.Equal(next.learned(), []string{other.at}) {
		t.Errorf("the next start knows %v, %v", next.learned(), err)
	}
}

// A server that has left the list, as one that was silent for some seconds does, is used when it is back and all others have failed: none
// of them can say that it is back. While others answer it is not asked.
func TestServerThatLeftTheList(t *testing.T) {
	given, paused, last := startServer(t, "127.0.0.1:0"), startServer(t, "127.0.0.1:0"), startServer(t, "127.0.0.1:0")
	cert := given.TLS.Certificates
	for _, s := range []*apiServer{paused, last} {
		s.TLS.Certificates = cert
	}
	b, client := startBalancer(t, "", given)
	b.learn([]string{given.at, paused.at, last.at})
	paused.end()
	b.learn([]string{given.at, last.at})
	testbed.Until(t, "the server in the list to be used", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if s := b.all[last.at]; s.state != up {
			return errors.New("it is not up")
		}
		return nil
	})
	back := startServer(t, paused.at)
	back.TLS.Certificates = cert
	b.mu.Lock()
	if s := b.all[paused.at]; s == nil || s.inUse() || b.best(nil) == s {
		t.Errorf("the server that has left is %+v", s)
	}
	b.mu.Unlock()
	for range 20 { // Run looks this often for servers to ask
		if at, _ := must(t, client, ""); at == back.at {
			t.Fatal("the server that has left the list is used beside others")
		}
	}
	given.end()
	last.end()
	testbed.Until(t, "the server that is back", func() error {
		at, body, err := get(t, client, "")
		if err == nil {
			body.Close()
		}
		if at != back.at {
			return fmt.Errorf("%s answers, %v", at, err)
		}
		return nil
	})
}

// What has left the list is remembered for a day, and not without bound.
func TestServersAreForgotten(t *testing.T) {
	b, err := New(Options{Node: "node", Config: &rest.Config{Host: "https://192.0.2.1"}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 * maxServers {
		b.learn([]string{fmt.Sprintf("192.0.2.2:%d", i)})
	}
	if n := len(b.all); n != maxServers+2 { // with the one of the list, and the one that was given
		t.Errorf("%d servers are known", n)
	}
	if newest := fmt.Sprintf("192.0.2.2:%d", 3*maxServers-2); b.all[newest] == nil {
		t.Errorf("%s has left last and is forgotten", newest)
	}
	for _, s := range b.all {
		s.left = s.left.Add(-keepLeft - time.Minute)
	}
	b.learn([]string{"192.0.2.3:1"})
	if n := len(b.all); n != 3 { // and the one that has just left
		t.Errorf("%d servers are known after a day", n)
	}
}

// Nodes spread over the servers, and one that is gone moves only its own nodes.
func TestNodesSpread(t *testing.T) {
	choose := func(node string, list ...string) string {
		b := &Balancer{node: node, all: map[string]*server{}}
		for _, at := range list {
			b.add(at).learned = true
		}
		b.add("any:6443").given = true
		return b.best(nil).at
	}
	count := map[string]int{}
	const nodes = 300
	for i := range nodes {
		node := fmt.Sprintf("node%d", i)
		at := choose(node, "192.0.2.1:6443", "192.0.2.2:6443", "192.0.2.3:6443")
		count[at]++
		if now := choose(node, "192.0.2.1:6443", "192.0.2.2:6443"); now != at && at != "192.0.2.3:6443" {
			t.Errorf("%s moves from %s to %s", node, at, now)
		}
	}
	for at, n := range count {
		if n < nodes/5 || n > nodes/2 {
			t.Errorf("%s has %d of %d nodes", at, n, nodes)
		}
	}
}

// A machine that is no server of the cluster, but is among the addresses, gets no request.
func TestForeignServer(t *testing.T) {
	real := startServer(t, "127.0.0.1:0")
	asked := make(chan struct{}, 100)
	foreign := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked <- struct{}{} }))
	foreign.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	foreign.TLS = &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}}
	foreign.StartTLS()
	defer foreign.Close()
	b, client := startBalancer(t, "", real)
	must(t, client, "")
	b.learn([]string{foreign.Listener.Addr().String()})
	testbed.Until(t, "the other one to be asked", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if s := b.all[foreign.Listener.Addr().String()]; s.pause == minProbe {
			return errors.New("not yet")
		}
		return nil
	})
	if at, _ := must(t, client, ""); at != real.at || len(asked) > 0 {
		t.Errorf("%s answers, the other one was asked %d times", at, len(asked))
	}
}

func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, leaf, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
