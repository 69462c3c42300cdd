package cli

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"

	"k8s.io/klog/v2"
)

// logLevels are the values of --log-level, and logFormats those of --log-format.
func logLevels() []string  { return []string{"debug", "info", "warn", "error"} }
func logFormats() []string { return []string{"text", "json"} }

// checkLogs rejects wrong values of the flags of logs.
func (g *global) checkLogs() error {
	if !slices.Contains(logLevels(), strings.ToLower(g.logLevel)) {
		return usagef("--log-level is %q; want %s", g.logLevel, wanted(g.logLevel, logLevels()))
	}
	if !slices.Contains(logFormats(), g.logFormat) {
		return usagef("--log-format is %q; want %s", g.logFormat, wanted(g.logFormat, logFormats()))
	}
	return nil
}

// logger makes the process's logger and sends the logs of the Kubernetes
// libraries to it as well.
func (g *global) logger() (*slog.Logger, error) {
	if err := g.checkLogs(); err != nil {
		return nil, err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(g.logLevel)); err != nil {
		return nil, usageError{err}
	}
	opts := &slog.HandlerOptions{Level: level}
	log := slog.New(slog.NewTextHandler(g.err, opts))
	if g.logFormat == "json" {
		log = slog.New(slog.NewJSONHandler(g.err, opts))
	}
	klog.SetSlogLogger(slog.New(libraryHandler{log.Handler(), level}))
	return log, nil
}

// libraryHandler drops what the Kubernetes libraries log below warning, unless the
// level is debug: at info they log their internals. What they call an error and is
// ordinary use becomes debug.
type libraryHandler struct {
	slog.Handler
	level slog.Level
}

// Enabled reports whether a record of level l may be written.
func (h libraryHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return h.Handler.Enabled(ctx, l) && (h.level <= slog.LevelDebug || l >= slog.LevelWarn)
}

// Handle writes a record.
func (h libraryHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelError && ordinary(r) {
		if r.Level = slog.LevelDebug; !h.Enabled(ctx, r.Level) {
			return nil
		}
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs returns a handler that adds attributes.
func (h libraryHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return libraryHandler{h.Handler.WithAttrs(a), h.level}
}

// WithGroup returns a handler that puts what follows into a group.
func (h libraryHandler) WithGroup(name string) slog.Handler {
	return libraryHandler{h.Handler.WithGroup(name), h.level}
}

// gone ends the text of an error by which a connection ends when the other side does, or
// interrupts what it asked for (net, net/http, golang.org/x/net/http2).
const gone = `(use of closed network connection|connection reset by peer|broken pipe|unexpected EOF|EOF|context canceled|` +
	`client disconnected|http2: stream closed|stream error: .*CANCEL.*|http: Handler timeout|` +
	`http: request body closed due to handler exiting|http: invalid Read on closed Body)$`

// ordinaryErrors are what the Kubernetes libraries (v0.37) log at level error although
// only a client has ended or interrupted what it asked for, each with the place and the
// reason.
var ordinaryErrors = []struct {
	message string
	// err is what its error must match; empty if it has none.
	err *regexp.Regexp
	// unset names an attribute that must be nil: it has the value of a panic.
	unset string
}{
	// k8s.io/streaming, httpstream/wsstream/conn.go: a client that is done with exec, attach
	// or port-forward over a WebSocket closes the connection.
	{message: "Error on socket receive", err: regexp.MustCompile(gone)},
	// k8s.io/apimachinery, util/proxy/upgradeaware.go: the same with SPDY, and Ctrl-C of
	// kubectl exec and port-forward.
	{message: "Error proxying data from client to backend", err: regexp.MustCompile(gone)},
	{message: "Error proxying data from backend to client", err: regexp.MustCompile(gone)},
	{message: "Error proxying response from backend to client", err: regexp.MustCompile(gone)},
	// k8s.io/cri-streaming, portforward/: nothing listens on the port in the Pod, which the
	// client is sent as the error of its stream; kubectl prints it.
	{message: "Unhandled Error", err: regexp.MustCompile(`^error forwarding port \d+ to pod `)},
	// k8s.io/cri-streaming, remotecommand/exec.go and attach.go: the agent ends, and with it
	// the exec, which the client is sent.
	{message: "Unhandled Error", err: regexp.MustCompile(`^error (executing command in|attaching to) container: context canceled$`)},
	// k8s.io/client-go, tools/cache/reflector.go: a server or an agent ends, and with it its
	// watches.
	{message: "Failed to watch", err: regexp.MustCompile(`context canceled$`)},
	// k8s.io/apiserver, storage/etcd3/watcher.go: each watch of the store, hundreds of them, while
	// several servers choose a leader, which they log themselves.
	{message: "watch chan error: etcdserver: no leader"},
	// k8s.io/apiserver, server/filters/wrap.go and timeout.go: a client has interrupted a
	// request, or it took longer than a minute, which the client is sent as 504. Both are
	// counted: apiserver_request_aborts_total, apiserver_request_terminations_total.
	{message: "Timeout or abort while handling"},
	{message: "Post-timeout activity", unset: "result"},
	// k8s.io/apiserver, endpoints/handlers/finisher: the rest of an interrupted request.
	{message: "Unhandled Error", err: regexp.MustCompile(
		`^FinishRequest: post-timeout activity .* panicked: false, err: (context canceled|<nil>), panic-reason: <nil>$`)},
	// k8s.io/apiserver, endpoints/handlers/responsewriters: the client has gone that would read
	// the answer, or the client has gone before its request was whole.
	{message: "Unhandled Error", err: regexp.MustCompile(`^apiserver was unable to write a .* response: .*` + gone)},
	{message: "Unhandled Error", err: regexp.MustCompile(`^apiserver was unable to close cleanly the response writer: .*` + gone)},
	{message: "Unhandled Error", err: regexp.MustCompile(`^apiserver received an error that is not an metav1\.Status: .*` + gone)},
}

// ofStore is in errors of etcd's client, which may end as those of a client do:
// "rpc error: code = Unavailable desc = error reading from server: EOF".
var ofStore = regexp.MustCompile(`rpc error|etcdserver|Unavailable|etcdclient`)

// ordinary reports whether a record of the Kubernetes libraries is among
// ordinaryErrors.
func ordinary(r slog.Record) bool {
	attrs := map[string]any{}
	r.Attrs(func(a slog.Attr) bool {
		attrs[a.Key] = a.Value.Any()
		return true
	})
	for _, o := range ordinaryErrors {
		if o.message != r.Message || o.unset != "" && attrs[o.unset] != nil {
			continue
		}
		err, has := attrs["err"]
		if has && ofStore.MatchString(fmt.Sprint(err)) {
			continue
		}
		if o.err == nil && (!has || err == nil) || o.err != nil && has && o.err.MatchString(fmt.Sprint(err)) {
			return true
		}
	}
	return false
}
