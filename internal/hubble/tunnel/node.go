package tunnel

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/reflector"
)

// A node without a connection tries again after minRetry, then after twice as long each time, up to maxRetry.
const (
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// maxToken bounds the file of a token, in bytes.
const maxToken = 64 << 10

// Node keeps a connection of this node to the relay, and answers over it.
type Node struct {
	client    kubernetes.Interface
	namespace string
	tokenFile string
	answer    http.Handler
	log       *slog.Logger
	retry     time.Duration // minRetry, unless a test wants another

	mu      sync.Mutex
	relay   published
	changed chan struct{} // closed when relay changes
}

// published is what the ConfigMap of a relay has.
type published struct{ address, certificate string }

// NewNode returns a Node for the relay of a namespace. It shows the token of a file, which may change, and answers by answer at
// hubble.Path.
func NewNode(client kubernetes.Interface, namespace, tokenFile string, answer http.Handler, log *slog.Logger) *Node {
	return &Node{
		client: client, namespace: namespace, tokenFile: tokenFile, answer: answer, log: log, retry: minRetry,
		changed: make(chan struct{}),
	}
}

// Run keeps the connection until ctx ends.
func (n *Node) Run(ctx context.Context) error {
	defer n.follow(ctx)()
	n.keep(ctx)
	return nil
}

// follow looks at the ConfigMap of the relay until ctx ends. The function that it returns waits for that.
func (n *Node) follow(ctx context.Context) (wait func()) {
	var wg sync.WaitGroup
	only := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", ConfigMap).String()}
	wg.Go(func() {
		reflector.Run(reflector.Quiet(ctx), "hubble/relay", reflector.From(n.client.CoreV1().ConfigMaps(n.namespace), only),
			reflector.Sink[*corev1.ConfigMap]{
				Replace: func(all []*corev1.ConfigMap) {
					to := published{}
					for _, c := range all {
						to = publishedIn(c)
					}
					n.set(to)
				},
				Set:    func(c *corev1.ConfigMap) { n.set(publishedIn(c)) },
				Delete: func(*corev1.ConfigMap) { n.set(published{}) },
			})
	})
	return wg.Wait
}

func publishedIn(c *corev1.ConfigMap) published {
	return published{address: c.Data[addressKey], certificate: c.Data[certificateKey]}
}

func (n *Node) set(to published) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if to != n.relay {
		n.relay = to
		close(n.changed)
		n.changed = make(chan struct{})
	}
}

// current is where the relay is, and a channel that is closed when that changes.
func (n *Node) current() (published, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.relay, n.changed
}

// keep connects again and again until ctx ends.
func (n *Node) keep(ctx context.Context) {
	wait, told := n.retry, ""
	for ctx.Err() == nil {
		to, changed := n.current()
		var pause <-chan time.Time // none: until there is a relay
		if to.address != "" {
			connected, err := n.connect(ctx, to, changed)
			if connected {
				wait, told = n.retry, ""
			}
			if err != nil && ctx.Err() == nil && err.Error() != told {
				told = err.Error()
				n.log.Warn("this node is not connected to the relay of flows; retrying", "relay", to.address, "err", err)
			}
			// Nodes do not come back at the same moment.
			pause = time.After(wait/2 + rand.N(wait))
			wait = min(2*wait, maxRetry)
		}
		select {
		case <-ctx.Done():
		case <-changed:
			wait = n.retry
		case <-pause:
		}
	}
}

// connect makes a connection and answers over it until it ends, the relay changes or ctx ends.
func (n *Node) connect(ctx context.Context, to published, changed <-chan struct{}) (connected bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := n.dial(ctx, to)
	if err != nil {
		return false, err
	}
	n.log.Info("connected to the relay of flows", "relay", to.address)
	go func() {
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
		}
	}()
	n.serve(ctx, conn)
	return true, nil
}

// dial makes a connection, and asks the relay to use it.
func (n *Node) dial(ctx context.Context, to published) (_ *served, err error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(to.certificate)) {
		return nil, fmt.Errorf("the ConfigMap %s/%s has no certificate", n.namespace, ConfigMap)
	}
	token, err := readToken(n.tokenFile)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, handshake)
	defer cancel()
	dialer := tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: serverName, MinVersion: tls.VersionTLS13}}
	conn, err := dialer.DialContext(ctx, "tcp", to.address)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	if err := conn.SetDeadline(time.Now().Add(handshake)); err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+serverName+hubble.Path, nil)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", protocol)
	r.Header.Set("Authorization", "Bearer "+token)
	if err := r.Write(conn); err != nil {
		return nil, err
	}
	in := bufio.NewReader(conn)
	answer, err := http.ReadResponse(in, r)
	if err != nil {
		return nil, fmt.Errorf("cannot read the answer: %w", err)
	}
	if answer.StatusCode != http.StatusSwitchingProtocols {
		text, _ := io.ReadAll(io.LimitReader(answer.Body, 512))
		return nil, fmt.Errorf("%s: %s", answer.Status, strings.TrimSpace(string(text)))
	}
	return &served{Conn: conn, in: in, ended: make(chan struct{})}, conn.SetDeadline(time.Time{})
}

func readToken(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxToken))
	token := strings.TrimSpace(string(text))
	if err == nil && (token == "" || strings.ContainsAny(token, " \r\n")) {
		err = fmt.Errorf("%s has no token", file)
	}
	return token, err
}

// serve answers over a connection until it or ctx ends.
func (n *Node) serve(ctx context.Context, conn *served) {
	mux := http.NewServeMux()
	mux.Handle(hubble.Path, n.answer)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: handshake, Protocols: unencryptedHTTP2(), HTTP2: silence()}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // before the server, whose Close waits for Accept
	defer stop()
	_ = server.Serve(&once{conn: conn}) // it ends when conn does
	<-conn.ended
	_ = server.Close()
}

// served is a connection of which a part may have been read already.
type served struct {
	net.Conn

	in    io.Reader
	close sync.Once
	ended chan struct{} // closed by Close
}

// Read is part of net.Conn.
func (s *served) Read(b []byte) (int, error) { return s.in.Read(b) }

// Close is part of net.Conn.
func (s *served) Close() error {
	s.close.Do(func() { close(s.ended) })
	return s.Conn.Close()
}

// once is a listener with one connection, which ends with it.
type once struct {
	conn  *served
	taken bool
}

// Accept is part of net.Listener.
func (o *once) Accept() (net.Conn, error) {
	if !o.taken {
		o.taken = true
		return o.conn, nil
	}
	<-o.conn.ended
	return nil, net.ErrClosed
}

// Close is part of net.Listener.
func (o *once) Close() error { return nil }

// Addr is part of net.Listener.
func (o *once) Addr() net.Addr { return o.conn.LocalAddr() }

var _ net.Listener = (*once)(nil)

// errNoName is that of a token which names no node.
var errNoName = errors.New("the token names no node: it must be that of a Pod")
