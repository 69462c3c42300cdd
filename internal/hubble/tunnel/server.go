package tunnel

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/hubble"
)

const (
	// maxConnections bounds the connections, used or not yet.
	maxConnections = 10_000
	// reviewsAtOnce bounds how many tokens the API server is asked about at a time.
	reviewsAtOnce = 16
	// maxAge is how long a connection lasts. Then the node shows a token of that time.
	maxAge = time.Hour
	// publishPeriod is how often the ConfigMap is compared with what it should have.
	publishPeriod = 30 * time.Second
)

// Server takes the connections of nodes, and asks over them: it is a relay.Nodes.
type Server struct {
	client  kubernetes.Interface
	account string // user name
	log     *slog.Logger
	age     time.Duration // maxAge, unless a test wants another

	certificate tls.Certificate
	text        string // the certificate as PEM
	published   atomic.Bool
	reviews     chan struct{}

	mu    sync.Mutex
	ended bool
	nodes map[string]*connection
}

// connection is one of a node.
type connection struct {
	*http.ClientConn

	address string
}

// NewServer returns a Server for nodes that show tokens of the ServiceAccount of a name. Its client may create TokenReviews, and get and
// update the ConfigMap.
func NewServer(client kubernetes.Interface, namespace, account string, log *slog.Logger) (*Server, error) {
	certificate, text, err := makeCertificate()
	if err != nil {
		return nil, err
	}
	return &Server{
		client: client, account: serviceaccount.MakeUsername(namespace, account), log: log, age: maxAge,
		certificate: certificate, text: text, reviews: make(chan struct{}, reviewsAtOnce), nodes: map[string]*connection{},
	}, nil
}

// Serve takes connections of l until ctx ends.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{
		Handler: s, ReadHeaderTimeout: handshake, ReadTimeout: handshake, IdleTimeout: handshake, MaxHeaderBytes: maxToken,
		ErrorLog:  slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{s.certificate}, MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}},
	}
	defer s.end()
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.ServeTLS(netutil.LimitListener(l, maxConnections), "", ""); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// end ends all connections of nodes, and takes no more.
func (s *Server) end() {
	s.mu.Lock()
	s.ended = true
	all := slices.Collect(maps.Values(s.nodes))
	s.mu.Unlock()
	for _, c := range all {
		_ = c.Close() // which takes it from s.nodes
	}
}

// ServeHTTP takes a connection.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != hubble.Path || r.Method != http.MethodGet || r.Header.Get("Upgrade") != protocol {
		http.Error(w, "only nodes with fairlead connect here; ask at the relay's port for users", http.StatusNotFound)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), handshake)
	defer cancel()
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer")
	node, err := s.review(ctx, strings.TrimSpace(token))
	if err != nil {
		code := http.StatusUnauthorized
		if errors.Is(err, errNoAnswer) {
			code = http.StatusServiceUnavailable
		}
		s.log.Warn("refused a connection to the relay of flows", "from", r.RemoteAddr, "err", err)
		http.Error(w, err.Error(), code)
		return
	}
	if err := s.take(w, node, r.RemoteAddr); err != nil {
		s.log.Warn("cannot use the connection of a node", "node", node, "from", r.RemoteAddr, "err", err)
	}
}

// errNoAnswer is that of a review which the API server did not make.
var errNoAnswer = errors.New("the API server does not review the token")

// review returns the node that a token names.
func (s *Server) review(ctx context.Context, token string) (node string, err error) {
	if token == "" {
		return "", errors.New("the request has no token")
	}
	select {
	case s.reviews <- struct{}{}:
		defer func() { <-s.reviews }()
	case <-ctx.Done():
		return "", fmt.Errorf("%w: too many connections at a time", errNoAnswer)
	}
	r := &authv1.TokenReview{Spec: authv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}}}
	if r, err = s.client.AuthenticationV1().TokenReviews().Create(ctx, r, metav1.CreateOptions{}); err != nil {
		return "", fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	names := r.Status.User.Extra[serviceaccount.NodeNameKey]
	switch {
	case !r.Status.Authenticated:
		return "", errors.New("the API server does not accept the token")
	case !slices.Contains(r.Status.Audiences, Audience):
		return "", fmt.Errorf("the token is not for the audience %s", Audience)
	case r.Status.User.Username != s.account:
		return "", fmt.Errorf("the token is that of %s; want one of %s", r.Status.User.Username, s.account)
	case len(names) != 1 || names[0] == "":
		return "", errNoName
	}
	return names[0], nil
}

// take makes the connection of a request that of a node, in place of an earlier one.
func (s *Server) take(w http.ResponseWriter, node, address string) error {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	conn = &served{Conn: conn, in: conn, ended: make(chan struct{})} // of which HTTP does not know that it has TLS
	text := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + protocol + "\r\n\r\n"
	err = conn.SetDeadline(time.Now().Add(handshake))
	if err == nil {
		_, err = io.WriteString(conn, text)
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = conn.Close()
		return err
	}
	transport := &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil },
		Protocols:   unencryptedHTTP2(), HTTP2: silence(),
		MaxResponseHeaderBytes: maxToken, DisableCompression: true,
	}
	client, err := transport.NewClientConn(context.Background(), "http", node+":80")
	if err != nil {
		_ = conn.Close()
		return err
	}
	s.use(node, &connection{ClientConn: client, address: address})
	return nil
}

// use asks a node by a connection from now on, until it ends.
func (s *Server) use(node string, c *connection) {
	s.mu.Lock()
	before := s.nodes[node]
	if s.ended {
		before = c
	} else {
		s.nodes[node] = c
	}
	s.mu.Unlock()
	if before != nil {
		_ = before.Close()
	}
	age := time.AfterFunc(s.age, func() { _ = c.Close() })
	ended := func() {
		age.Stop()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.nodes[node] == c {
			delete(s.nodes, node)
		}
	}
	c.SetStateHook(func(state *http.ClientConn) {
		if state.Err() != nil {
			ended()
		}
	})
	if c.Err() != nil { // before the hook
		ended()
	}
}

func (s *Server) of(node string) *connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes[node]
}

// Address is part of relay.Nodes: that from which the node has connected.
func (s *Server) Address(n *corev1.Node) string {
	if c := s.of(n.Name); c != nil {
		return c.address
	}
	return ""
}

// Ask is part of relay.Nodes.
func (s *Server) Ask(ctx context.Context, node, method string, request []byte) (io.ReadCloser, error) {
	c := s.of(node)
	if c == nil {
		return nil, status.Errorf(codes.Unavailable,
			"node %s is not connected: its proxy does not run, has no --hubble-relay-token-file, or does not reach the relay", node)
	}
	target := url.URL{Scheme: "http", Host: node, Path: hubble.Path + method}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, target.String(), bytes.NewReader(request))
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	answer, err := c.RoundTrip(r)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "node %s does not answer: %v", node, err)
	}
	if answer.StatusCode != http.StatusOK {
		_ = answer.Body.Close()
		return nil, status.Errorf(codes.Unavailable, "node %s answers %s", node, answer.Status)
	}
	return answer.Body, nil
}

// Published reports whether nodes can find the relay.
func (s *Server) Published() error {
	if !s.published.Load() {
		return fmt.Errorf("the ConfigMap %s does not have the address of this relay", ConfigMap)
	}
	return nil
}

// Publish writes where the relay is to the ConfigMap of a namespace, which must exist, and repairs it until ctx ends.
func (s *Server) Publish(ctx context.Context, namespace, address string) error {
	told := ""
	for {
		err := s.publish(ctx, namespace, address)
		s.published.Store(err == nil)
		if err == nil {
			told = ""
		} else if text := err.Error(); text != told && ctx.Err() == nil {
			told = text
			s.log.Error("cannot publish the address of this relay; retrying", "err", err)
		}
		wait := publishPeriod
		if err != nil {
			wait = minRetry
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

func (s *Server) publish(ctx context.Context, namespace, address string) error {
	ctx, cancel := context.WithTimeout(ctx, handshake)
	defer cancel()
	configs := s.client.CoreV1().ConfigMaps(namespace)
	c, err := configs.Get(ctx, ConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: apply deploy/kubernetes/hubble-relay.yaml", err)
	}
	if err != nil || publishedIn(c) == (published{address: address, certificate: s.text}) {
		return err
	}
	c = c.DeepCopy()
	c.Data = map[string]string{addressKey: address, certificateKey: s.text}
	_, err = configs.Update(ctx, c, metav1.UpdateOptions{})
	return err
}
