package parts

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/lifecycle"
	"github.com/fairlead/fairlead/internal/dataplane/drops"
	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/capture"
	"github.com/fairlead/fairlead/internal/hubble/seen"
	"github.com/fairlead/fairlead/internal/hubble/tunnel"
	"github.com/fairlead/fairlead/internal/kernel/nflog"
	"github.com/fairlead/fairlead/internal/kernel/socket"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/reflector"
)

// hubbleFlags have a node record flows and answer Hubble's API.
type hubbleFlags struct {
	listen string
	path   string // of the socket; empty for none
	token  string // file with what is shown to the relay of a Kubernetes cluster; empty for none
}

func (f *hubbleFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.listen, "hubble-listen-address", "",
		"record the flows of this node and answer Hubble's API to root at unix:PATH, for example unix:///run/fairlead/hubble.sock; "+
			"the API server answers it for all such nodes; empty for none")
}

// addRelay adds the flag of nodes without an agent.
func (f *hubbleFlags) addRelay(flags *pflag.FlagSet) {
	flags.StringVar(&f.token, "hubble-relay-token-file", "",
		"record the flows of this node and answer the relay of deploy/kubernetes/hubble-relay.yaml; FILE has the token of this Pod "+
			"for the audience "+tunnel.Audience+"; empty for no relay")
}

// maxSocketPath is the longest path of a Unix socket (sun_path, with its NUL).
const maxSocketPath = 107

func (f *hubbleFlags) check() error {
	f.path = ""
	if f.token != "" && !filepath.IsAbs(f.token) {
		return base.Usagef("--hubble-relay-token-file is %q; want an absolute path", f.token)
	}
	if f.listen == "" {
		return nil
	}
	path, isUnix := strings.CutPrefix(f.listen, "unix:")
	path = filepath.Clean(path)
	if !isUnix || !filepath.IsAbs(path) || path == "/" || len(path) > maxSocketPath {
		return base.Usagef("--hubble-listen-address is %q; want unix:PATH with an absolute path of at most %d bytes. "+
			"Other machines ask the API server", f.listen, maxSocketPath)
	}
	f.path = path
	return nil
}

// Flows are the flows of this node.
type Flows struct {
	log      *slog.Logger
	path     string // of the socket; empty for none
	token    string // file of the token for the relay; empty for none
	peers    *capture.Peers
	ring     *hubble.Ring
	lost     *nflog.Log // nil if the mode logs none
	l7       *capture.Applications
	metrics  *hubble.Metrics
	observer *hubble.Observer
}

// open prepares to record flows. It returns nil if they are not wanted.
func (f *hubbleFlags) open(log *slog.Logger, node string) *Flows {
	if f.path == "" && f.token == "" {
		return nil
	}
	out := &Flows{
		log: log, path: f.path, token: f.token,
		peers: capture.NewPeers(node), ring: hubble.NewRing(hubble.RingSize), metrics: hubble.NewMetrics(),
	}
	out.ring.Count(out.metrics)
	out.l7 = capture.NewApplications(out.ring, out.peers)
	out.observer = hubble.NewObserver(node, base.Version, out.ring)
	if f.path != "" {
		out.observer.Address = "unix://" + f.path
	}
	var err error
	if out.lost, err = nflog.Open(drops.LogGroup); err != nil {
		log.Warn("packets that reach no endpoint are not shown as flows", "err", err)
	}
	return out
}

// loses closes the log of packets that reach no endpoint unless the mode fills it.
func (f *Flows) loses(mode proxyMode) {
	if f == nil || f.lost == nil || mode.logs {
		return
	}
	f.log.Info("packets that reach no endpoint are not shown as flows: only mode nft logs them", "mode", mode.name)
	_ = f.lost.Close()
	f.lost = nil
}

// Requests records requests of HTTP, nil if none are recorded.
func (f *Flows) Requests() seen.Requests {
	if f == nil {
		return nil
	}
	return f.l7.Requests()
}

// Questions records questions of DNS, nil if none are recorded.
func (f *Flows) Questions() seen.Questions {
	if f == nil {
		return nil
	}
	return f.l7.Questions()
}

// ServeHTTP answers the relay of the API server.
func (f *Flows) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f == nil {
		http.Error(w, "this node records no flows: start its agent with --hubble-listen-address", http.StatusNotFound)
		return
	}
	hubble.Handler(f.observer).ServeHTTP(w, r)
}

// Components record flows, count them among the metrics of p, and answer at the socket and to the relay; none if f is nil. With all set
// all Pods of the cluster are followed, otherwise the Pods of this node: others are known by EndpointSlices.
func (f *Flows) Components(client kubernetes.Interface, p *proxy.Proxy, node string, all bool) ([]lifecycle.Component, error) {
	if f == nil {
		return nil, nil
	}
	answers, err := f.answers(client)
	if err != nil {
		return nil, err
	}
	p.Register(f.metrics)
	pods := metav1.ListOptions{}
	if !all {
		pods.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	}
	recorder := capture.New(capture.Options{
		Ring: f.ring, Peers: f.peers, Table: p.Table, Index: proxy.OwnersOf(p), Lost: f.lost, Log: f.log,
	})
	follow := func(ctx context.Context) error {
		var wg sync.WaitGroup
		wg.Go(func() {
			reflector.Run(ctx, "hubble/pods", reflector.From(client.CoreV1().Pods(metav1.NamespaceAll), pods), f.peers.Pods())
		})
		wg.Go(func() {
			reflector.Run(ctx, "hubble/nodes", reflector.From(client.CoreV1().Nodes(), metav1.ListOptions{}), f.peers.Nodes())
		})
		wg.Wait()
		return nil
	}
	return append(answers,
		lifecycle.Component{Name: "Pods of flows", Run: follow},
		lifecycle.Component{Name: "flows", Run: recorder.Run},
		lifecycle.Component{Name: "flows of requests", Run: f.l7.Run},
	), nil
}

// answers are the components that answer at the socket and to the relay.
func (f *Flows) answers(client kubernetes.Interface) (out []lifecycle.Component, err error) {
	if f.path != "" {
		listener, err := listenForRoot(f.path, f.log)
		if err != nil {
			return nil, fmt.Errorf("--hubble-listen-address: %w", err)
		}
		out = append(out, lifecycle.Component{
			Name: "Hubble's API", Run: func(ctx context.Context) error { return f.serve(ctx, listener) },
		})
	}
	if f.token != "" {
		node := tunnel.NewNode(client, metav1.NamespaceSystem, f.token, hubble.Handler(f.observer), f.log)
		out = append(out, lifecycle.Component{Name: "answers to the relay of flows", Run: node.Run})
	}
	return out, nil
}

// serve answers gRPC until ctx ends.
func (f *Flows) serve(ctx context.Context, listener net.Listener) error {
	server := hubble.NewServer(f.observer)
	defer context.AfterFunc(ctx, server.Stop)()
	err := server.Serve(listener)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// rootListener accepts only connections of root, and of the user of this process.
type rootListener struct {
	net.Listener
	log *slog.Logger
}

// listenForRoot listens at a Unix socket. It replaces the socket of a process that has ended.
func listenForRoot(path string, log *slog.Logger) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("%s exists and is not a socket", path)
		}
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("another process listens at %s", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &rootListener{l, log}, nil
}

// Accept is part of net.Listener.
func (l *rootListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if u, ok := c.(*net.UnixConn); ok {
			if _, uid, err := socket.Peer(u); err == nil && (uid == 0 || uid == os.Geteuid()) {
				return c, nil
			}
		}
		l.log.Warn("refused a connection to the flows of this node: only root may read them")
		_ = c.Close()
	}
}
