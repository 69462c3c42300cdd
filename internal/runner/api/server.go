// Package api is the HTTPS endpoint of the agent: logs, exec, attach, port-forward, usage and status.
package api

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/logfile"
	"github.com/fairlead/fairlead/internal/runner/pod"
)

// clientName is the common name of the only client that the endpoint accepts.
const clientName = "fairlead-apiserver"

// idleTimeout ends an exec or a forwarded port on which nothing moves, that of
// kubelet.
const idleTimeout = 4 * time.Hour

// Options configure a Server.
type Options struct {
	NodeName string
	// Listener is where HTTPS is served; Run closes it.
	Listener    net.Listener
	Certificate Certificate
	// ClientCA signs the one client that is admitted.
	ClientCA func() (*x509.CertPool, error)
	// Status is what GET /status answers, as JSON; nil for none.
	Status func() any
	// Views are what GET /NAME answers, by NAME.
	Views map[string]View
	// Trace sends a packet from this node, or from one of its Pods, and returns what became of it; nil for none.
	Trace Trace
	// Handlers answer at their paths, and below if they end in a slash.
	Handlers map[string]http.Handler
	// Pods are the Pods of this node. Registered reports whether a Pod stands for a program of this node.
	Pods       func() []*pod.Snapshot
	Registered func(namespace, name string) bool
	Groups     *confinement.Groups
	Log        *slog.Logger
}

// View answers a request by its query, as JSON. Its error is the request's fault if it is a BadQuery.
type View func(ctx context.Context, query url.Values) (any, error)

// BadQuery is the error of a View whose query is wrong.
type BadQuery string

func (e BadQuery) Error() string { return string(e) }

// Busy is the error of a View that cannot answer now; later it may.
type Busy string

func (e Busy) Error() string { return string(e) }

// viewTimeout bounds how long a View may take.
const viewTimeout = 20 * time.Second

// Server is the HTTPS endpoint of the agent, from which the API server gets logs, exec, port-forward and figures.
type Server struct{ o Options }

// New returns a Server that serves nothing before Run.
func New(o Options) *Server { return &Server{o} }

// Run answers the API server until ctx ends, and closes the Listener.
func (s *Server) Run(ctx context.Context) {
	requests, endRequests := context.WithCancel(context.Background())
	defer endRequests()
	server := &http.Server{
		Handler:           s.handler(requests),
		ReadHeaderTimeout: 10 * time.Second,
		TLSNextProto:      map[string]func(*http.Server, *tls.Conn, http.Handler){}, // upgrades need HTTP/1.1
		ErrorLog:          slog.NewLogLogger(s.o.Log.Handler(), slog.LevelDebug),
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{s.o.Certificate.pair},
			ClientAuth: tls.RequireAndVerifyClientCert,
			VerifyConnection: func(t tls.ConnectionState) error {
				if len(t.PeerCertificates) == 0 || t.PeerCertificates[0].Subject.CommonName != clientName {
					return fmt.Errorf("only %s may connect", clientName)
				}
				return nil
			},
		},
	}
	plain := server.TLSConfig.Clone()
	server.TLSConfig.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		c := plain.Clone()
		var err error
		c.ClientCAs, err = s.o.ClientCA()
		return c, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.ServeTLS(s.o.Listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			s.o.Log.Error("cannot serve logs and exec", "err", err)
		}
	}()
	<-ctx.Done()
	endRequests() // Close leaves hijacked connections open
	_ = server.Close()
	<-done
}

// viewsAtOnce bounds the questions that are answered at a time: some read the kernel's tables. Others wait.
const viewsAtOnce = 8

// handler is the endpoint. Streams end with ctx.
func (s *Server) handler(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	mux.HandleFunc("GET /status", s.serveStatus)
	places := make(chan struct{}, viewsAtOnce)
	for name, view := range s.o.Views {
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, q *http.Request) {
			serveView(ctx, func(ctx context.Context, query url.Values) (any, error) {
				select {
				case places <- struct{}{}:
					defer func() { <-places }()
				case <-ctx.Done():
					return nil, Busy("this node answers other questions: try again")
				}
				return view(ctx, query)
			}, w, q)
		})
	}
	for path, h := range s.o.Handlers {
		mux.HandleFunc(path, func(w http.ResponseWriter, q *http.Request) {
			streaming, cancel := context.WithCancel(q.Context())
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			h.ServeHTTP(w, q.WithContext(streaming))
		})
	}
	for pattern, serve := range map[string]func(context.Context, http.ResponseWriter, *http.Request) error{
		"GET /containerLogs/{namespace}/{pod}/{container}": s.serveLogs,
		"GET /stats/summary":                    s.serveSummary,
		"/exec/{namespace}/{pod}/{container}":   s.serveExec,
		"/attach/{namespace}/{pod}/{container}": s.serveAttach,
		"/portForward/{namespace}/{pod}":        s.servePortForward,
		"POST /trace":                           s.serveTrace,
		"POST /trace/{namespace}/{pod}":         s.serveTrace,
		"POST /podTrace/{namespace}/{pod}":      s.serveTrace,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, q *http.Request) {
			if err := serve(ctx, w, q); err != nil {
				fail(w, err)
			}
		})
	}
	return mux
}

// httpError is an answer other than 200.
type httpError struct {
	code    int
	message string
}

func (e httpError) Error() string { return e.message }

func badRequest(format string, args ...any) error {
	return httpError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

func fail(w http.ResponseWriter, err error) {
	var h httpError
	if !errors.As(err, &h) {
		h = httpError{http.StatusInternalServerError, err.Error()}
	}
	http.Error(w, h.message, h.code)
}

func (s *Server) serveStatus(w http.ResponseWriter, _ *http.Request) {
	if s.o.Status == nil {
		fail(w, httpError{http.StatusNotFound, "this agent has no status to show"})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.o.Status())
}

// serveView answers by a View, which ends with the request, or with ctx.
func serveView(ctx context.Context, view View, w http.ResponseWriter, q *http.Request) {
	ctx, cancel := context.WithTimeout(ctx, viewTimeout)
	defer cancel()
	defer context.AfterFunc(q.Context(), cancel)()
	out, err := view(ctx, q.URL.Query())
	var bad BadQuery
	var busy Busy
	switch {
	case errors.As(err, &bad):
		fail(w, badRequest("%s", bad))
		return
	case errors.As(err, &busy):
		fail(w, httpError{http.StatusTooManyRequests, string(busy)})
		return
	case err != nil:
		fail(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out)
}

// find returns a pod of this node, the younger of two with the same name: the
// older one is terminating.
func (s *Server) find(q *http.Request) (*pod.Snapshot, error) {
	ns, name := q.PathValue("namespace"), q.PathValue("pod")
	var found *pod.Snapshot
	for _, p := range s.o.Pods() {
		if p.Namespace == ns && p.Name == name && (found == nil || p.Created.After(found.Created)) {
			found = p
		}
	}
	if found == nil && s.o.Registered(ns, name) {
		return nil, httpError{http.StatusBadRequest, fmt.Sprintf("pod %s/%s stands for a program that the node does not start: "+
			"there are no logs, exec or port-forward", ns, name)}
	}
	if found == nil {
		return nil, httpError{http.StatusNotFound, fmt.Sprintf("pod %s/%s is not on this node", ns, name)}
	}
	return found, nil
}

func (s *Server) findContainer(q *http.Request) (*pod.Snapshot, pod.ContainerSnapshot, error) {
	p, err := s.find(q)
	if err != nil {
		return nil, pod.ContainerSnapshot{}, err
	}
	name := q.PathValue("container")
	c, ok := p.Containers[name]
	if !ok {
		return nil, c, httpError{http.StatusNotFound, fmt.Sprintf("pod %s has no container %s", p.Name, name)}
	}
	return p, c, nil
}

func (s *Server) serveLogs(ctx context.Context, w http.ResponseWriter, q *http.Request) error {
	p, c, err := s.findContainer(q)
	if err != nil {
		return err
	}
	name := q.PathValue("container")
	query, previous, err := logQuery(q.URL.Query(), time.Now())
	if err != nil {
		return err
	}
	attempt := c.Attempt
	switch {
	case previous && attempt < 1:
		return badRequest("previous terminated container %q in pod %q not found", name, p.Name)
	case previous:
		attempt--
		query.Follow = false
	case attempt < 0:
		return badRequest("container %q in pod %q is waiting to start", name, p.Name)
	case c.Running:
		query.Done = c.Done
	default:
		query.Follow = false
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(q.Context(), cancel)()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	flush := func() { _ = http.NewResponseController(w).Flush() }
	if query.Follow {
		w.WriteHeader(http.StatusOK)
		flush()
	}
	if err := logfile.Read(ctx, p.Paths.Log(name, attempt), query, w, flush); err != nil {
		// The status line is sent: it is too late for an error answer.
		s.o.Log.Debug("cannot send logs", "namespace", p.Namespace, "pod", p.Name, "err", err)
	}
	return nil
}

// logQuery reads the parameters of PodLogOptions.
func logQuery(v url.Values, now time.Time) (q logfile.Query, previous bool, err error) {
	number := func(name string) *int64 {
		s := v.Get(name)
		if s == "" || err != nil {
			return nil
		}
		n, e := strconv.ParseInt(s, 10, 64)
		if e != nil || n < 0 {
			err = badRequest("%s: %q is not a number from 0 on", name, s)
			return nil
		}
		return &n
	}
	truth := func(name string) bool {
		b, e := strconv.ParseBool(v.Get(name))
		if e != nil && v.Get(name) != "" && err == nil {
			err = badRequest("%s: %q is not true or false", name, v.Get(name))
		}
		return b
	}
	q.Tail = number("tailLines")
	if t := number("tail"); q.Tail == nil {
		q.Tail = t
	}
	if n := number("limitBytes"); n != nil {
		q.LimitBytes = *n
	}
	if n := number("sinceSeconds"); n != nil {
		q.Since = now.Add(-time.Duration(*n) * time.Second)
	}
	if s := v.Get("sinceTime"); s != "" && err == nil {
		if q.Since, err = time.Parse(time.RFC3339, s); err != nil {
			err = badRequest("sinceTime: %q is not a time such as 2026-01-02T15:04:05Z", s)
		}
	}
	switch s := v.Get("stream"); s {
	case "", corev1.LogStreamAll:
	case corev1.LogStreamStdout:
		q.Stream = logfile.Stdout
	case corev1.LogStreamStderr:
		q.Stream = logfile.Stderr
	default:
		return q, false, badRequest("stream: %q is not All, Stdout or Stderr", s)
	}
	q.Timestamps, q.Follow, previous = truth("timestamps"), truth("follow"), truth("previous")
	return q, previous, err
}

// streamOptions reads which streams are wanted: kubelet's names of the parameters
// and kubectl's.
func streamOptions(v url.Values) (*remotecommand.Options, error) {
	has := func(names ...string) bool {
		for _, n := range names {
			if b, err := strconv.ParseBool(v.Get(n)); err == nil && b {
				return true
			}
		}
		return false
	}
	o := &remotecommand.Options{
		Stdin: has("input", "stdin"), Stdout: has("output", "stdout"), Stderr: has("error", "stderr"), TTY: has("tty"),
	}
	o.Stderr = o.Stderr && !o.TTY // a terminal has one output
	if !o.Stdin && !o.Stdout && !o.Stderr {
		return nil, badRequest("at least one of stdin, stdout and stderr is needed")
	}
	return o, nil
}

func (s *Server) serveExec(ctx context.Context, w http.ResponseWriter, q *http.Request) error {
	p, c, err := s.findContainer(q)
	if err != nil {
		return err
	}
	o, err := streamOptions(q.URL.Query())
	if err != nil {
		return err
	}
	args := q.URL.Query()["command"]
	switch {
	case len(args) == 0:
		return badRequest("command: you must specify at least one")
	case !c.Running:
		return badRequest("container %q in pod %q is not running", q.PathValue("container"), p.Name)
	}
	remotecommand.ServeExec(w, q, streamer{ctx, p}, p.Name, "", q.PathValue("container"), args, o,
		idleTimeout, remotecommand.DefaultStreamCreationTimeout, remotecommand.SupportedStreamingProtocols)
	return nil
}

func (s *Server) serveAttach(ctx context.Context, w http.ResponseWriter, q *http.Request) error {
	p, c, err := s.findContainer(q)
	if err != nil {
		return err
	}
	o, err := streamOptions(q.URL.Query())
	if err != nil {
		return err
	}
	if !c.Running {
		return badRequest("container %q in pod %q is not running", q.PathValue("container"), p.Name)
	}
	remotecommand.ServeAttach(w, q, streamer{ctx, p}, p.Name, "", q.PathValue("container"), o,
		idleTimeout, remotecommand.DefaultStreamCreationTimeout, remotecommand.SupportedStreamingProtocols)
	return nil
}

func (s *Server) servePortForward(ctx context.Context, w http.ResponseWriter, q *http.Request) error {
	p, err := s.find(q)
	if err != nil {
		return err
	}
	if p.NetnsPID == 0 && !p.HostNetwork {
		return badRequest("pod %q is not running", p.Name)
	}
	o, err := portforward.NewV4Options(q)
	if err != nil {
		return badRequest("%v", err)
	}
	portforward.ServePortForward(w, q, streamer{ctx, p}, p.Name, "", o,
		idleTimeout, remotecommand.DefaultStreamCreationTimeout, portforward.SupportedProtocols)
	return nil
}
