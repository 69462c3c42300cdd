package servers

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/reflector"
	"github.com/fairlead/fairlead/internal/svc"
)

// Use has the clients made from cfg use the server that answers. It replaces cfg.Dial.
func (b *Balancer) Use(cfg *rest.Config) {
	cfg.Dial = b.dial
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return &transport{b, next} })
}

// dial connects to a server, or to what else client-go has to connect to, as a proxy.
func (b *Balancer) dial(ctx context.Context, network, at string) (net.Conn, error) {
	b.mu.Lock()
	s, timeout := b.all[at], aloneTimeout
	if len(b.all) > 1 {
		timeout = dialTimeout
	}
	b.mu.Unlock()
	c, err := (&net.Dialer{Timeout: timeout, KeepAlive: 30 * time.Second}).DialContext(ctx, network, at)
	if err != nil || s == nil {
		return c, err
	}
	tracked := &conn{Conn: c}
	tracked.heard.Store(int64(time.Since(begin)))
	tracked.gone = func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(s.conns, tracked)
	}
	b.mu.Lock()
	s.conns[tracked] = struct{}{}
	b.mu.Unlock()
	return tracked, nil
}

// transport sends requests to the server that the Balancer picks.
type transport struct {
	b    *Balancer
	next http.RoundTripper
}

// RoundTrip sends req to one server after the other until one answers, as long as it
// cannot have had an effect.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	tried := map[*server]bool{}
	watch := isWatch(req)
	var failed error // of the last try
	for again := false; ; again = true {
		s, err := t.b.pick(req.Context(), tried, watch)
		if err != nil {
			if req.Body != nil && !again {
				_ = req.Body.Close()
			}
			if failed != nil && !isDial(failed) {
				err = failed
			}
			return nil, err
		}
		out := req.Clone(req.Context())
		out.URL.Host, out.Host = s.at, ""
		if again && req.GetBody != nil {
			if out.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
		resp, err := t.next.RoundTrip(out)
		if err == nil {
			t.b.answers(s)
			if watch {
				resp.Body = &watchBody{resp.Body, req.Context()}
			}
			return resp, nil
		}
		if req.Context().Err() != nil {
			return nil, err
		}
		tried[s], failed = true, err
		unsent := isDial(err)
		if unsent {
			t.b.leave(s, err)
		}
		if !unsent && req.Method != http.MethodGet || req.Body != nil && req.GetBody == nil {
			return nil, err
		}
	}
}

func (t *transport) WrappedRoundTripper() http.RoundTripper { return t.next }

func isWatch(req *http.Request) bool {
	return req.Method == http.MethodGet && strings.Contains(req.URL.RawQuery, "watch=")
}

// isDial reports whether a request was not sent because there was no connection.
func isDial(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// watchBody ends like a watch whose server has ended, however its connection did: a
// reflector continues where it was.
type watchBody struct {
	io.ReadCloser
	ctx context.Context
}

func (w *watchBody) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && w.ctx.Err() == nil {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// Follow returns a Sink that learns the servers from the EndpointSlices that pass
// through it to another one.
func (b *Balancer) Follow(to reflector.Sink[*discoveryv1.EndpointSlice]) reflector.Sink[*discoveryv1.EndpointSlice] {
	known := map[svc.Name][]string{}
	learn := func() {
		var all []string
		for _, list := range known {
			all = append(all, list...)
		}
		b.learn(all)
	}
	next := to
	to.Replace = func(list []*discoveryv1.EndpointSlice) {
		clear(known)
		for _, s := range list {
			if ofServers(s) {
				known[svc.Name{Namespace: s.Namespace, Name: s.Name}] = serversOf(s)
			}
		}
		learn()
		next.Replace(list)
	}
	to.Set = func(s *discoveryv1.EndpointSlice) {
		if ofServers(s) {
			known[svc.Name{Namespace: s.Namespace, Name: s.Name}] = serversOf(s)
			learn()
		}
		next.Set(s)
	}
	to.Delete = func(s *discoveryv1.EndpointSlice) {
		if ofServers(s) {
			delete(known, svc.Name{Namespace: s.Namespace, Name: s.Name})
			learn()
		}
		next.Delete(s)
	}
	return to
}

// ofServers reports whether a slice has the addresses of API servers.
func ofServers(s *discoveryv1.EndpointSlice) bool {
	return s.Namespace == metav1.NamespaceDefault && s.Labels[discoveryv1.LabelServiceName] == "kubernetes"
}

// serversOf returns the addresses of a slice.
func serversOf(s *discoveryv1.EndpointSlice) (out []string) {
	for _, p := range s.Ports {
		if p.Port == nil || p.Name == nil || *p.Name != "https" {
			continue
		}
		for _, e := range s.Endpoints {
			for _, a := range e.Addresses {
				out = append(out, net.JoinHostPort(a, strconv.Itoa(int(*p.Port))))
			}
		}
	}
	return out
}
