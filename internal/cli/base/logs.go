package base

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"

	"k8s.io/klog/v2"
)

// LogLevels are the values of --log-level.
func LogLevels() []string { return []string{"debug", "info", "warn", "error"} }

// LogFormats are the values of --log-format.
func LogFormats() []string { return []string{"text", "json"} }

// CheckLogs rejects wrong values of the flags of logs.
func (g *Global) CheckLogs() error {
	if !slices.Contains(LogLevels(), strings.ToLower(g.LogLevel)) {
		return Usagef("--log-level is %q; want %s", g.LogLevel, Wanted(g.LogLevel, LogLevels()))
	}
	if !slices.Contains(LogFormats(), g.LogFormat) {
		return Usagef("--log-format is %q; want %s", g.LogFormat, Wanted(g.LogFormat, LogFormats()))
	}
	return nil
}

// Logger makes the process's logger and sends the logs of the Kubernetes
// libraries to it as well.
func (g *Global) Logger() (*slog.Logger, error) {
	if err := g.CheckLogs(); err != nil {
		return nil, err
	}
	if err := g.SetLevel(g.LogLevel); err != nil {
		return nil, AsUsage(err)
	}
	opts := &slog.HandlerOptions{Level: &g.level}
	log := slog.New(slog.NewTextHandler(g.Err, opts))
	if g.LogFormat == "json" {
		log = slog.New(slog.NewJSONHandler(g.Err, opts))
	}
	klog.SetSlogLogger(slog.New(libraryHandler{log.Handler(), &g.level}))
	return log, nil
}

// SetLevel sets the level of loggers that Logger has returned and returns.
func (g *Global) SetLevel(text string) error { return g.level.UnmarshalText([]byte(text)) }

// libraryHandler drops what the Kubernetes libraries log below warning, unless the
// level is debug: at info they log their internals. What they call an error and is
// ordinary use becomes debug.
type libraryHandler struct {
	slog.Handler
	level slog.Leveler
}

// Enabled reports whether a record of level l may be written.
func (h libraryHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return h.Handler.Enabled(ctx, l) && (h.level.Level() <= slog.LevelDebug || l >= slog.LevelWarn)
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

// disconnected ends the text of an error of a connection whose other side has ended it, or has
// interrupted its request (net, net/http, golang.org/x/net/http2).
const disconnected = `(use of closed network connection|connection reset by peer|broken pipe|unexpected EOF|EOF|context canceled|` +
	`client disconnected|http2: stream closed|stream error: .*CANCEL.*|http: Handler timeout|` +
	`http: request body closed due to handler exiting|http: invalid Read on closed Body)$`

// ordinaryErrors are what the Kubernetes libraries (v0.37) log at level error although
// only a client has ended or interrupted what it asked for, each with the place and the
// reason.
var ordinaryErrors = []struct {
	message string
	// err is what its error must match; nil if it has none.
	err func() *regexp.Regexp
	// unset names an attribute that must be nil: it has the value of a panic.
	unset string
}{
	// k8s.io/streaming, httpstream/wsstream/conn.go: a client that is done with exec, attach
	// or port-forward over a WebSocket closes the connection.
	{message: "Error on socket receive", err: form(disconnected)},
	// k8s.io/apimachinery, util/proxy/upgradeaware.go: the same with SPDY, and Ctrl-C of
	// kubectl exec and port-forward.
	{message: "Error proxying data from client to backend", err: form(disconnected)},
	{message: "Error proxying data from backend to client", err: form(disconnected)},
	{message: "Error proxying response from backend to client", err: form(disconnected)},
	// k8s.io/cri-streaming, portforward/: nothing listens on the port in the Pod, which the
	// client is sent as the error of its stream; kubectl prints it.
	{message: "Unhandled Error", err: form(`^error forwarding port \d+ to pod `)},
	// k8s.io/cri-streaming, remotecommand/exec.go and attach.go: the agent ends, and with it
	// the exec, which the client is sent.
	{message: "Unhandled Error", err: form(`^error (executing command in|attaching to) container: context canceled$`)},
	// k8s.io/client-go, tools/cache/reflector.go: a server or an agent ends, and with it its
	// watches.
	{message: "Failed to watch", err: form(`context canceled$`)},
	// k8s.io/client-go, rest/request.go: the same with a list or a get.
	{message: "Unexpected error when reading response body", err: form(`^context canceled$`)},
	// k8s.io/apiextensions-apiserver, pkg/controller: a server ends while it establishes definitions, as in its first seconds.
	{message: "Unhandled Error", err: form(`^[a-z0-9.-]+ failed with: (.*: )?context canceled$`)},
	// k8s.io/apiserver, storage/etcd3/watcher.go: each watch of the store, hundreds of them, while
	// several servers choose a leader, which they log themselves.
	{message: "watch chan error: etcdserver: no leader"},
	// k8s.io/apiserver, server/filters/wrap.go and timeout.go: a client has interrupted a
	// request, or it took longer than a minute, which the client is sent as 504. Both are
	// counted: apiserver_request_aborts_total, apiserver_request_terminations_total.
	{message: "Timeout or abort while handling"},
	{message: "Post-timeout activity", unset: "result"},
	// k8s.io/apiserver, endpoints/handlers/finisher: the rest of an interrupted request.
	{message: "Unhandled Error", err: form(
		`^FinishRequest: post-timeout activity .* panicked: false, err: (context canceled|<nil>), panic-reason: <nil>$`)},
	// k8s.io/apiserver, endpoints/handlers/responsewriters: the client has disconnected before it
	// read the answer, or before its request was complete.
	{message: "Unhandled Error", err: form(`^apiserver was unable to write a .* response: .*` + disconnected)},
	{message: "Unhandled Error", err: form(`^apiserver was unable to close cleanly the response writer: .*` + disconnected)},
	{message: "Unhandled Error", err: form(`^apiserver received an error that is not an metav1\.Status: .*` + disconnected)},
}

// form returns a regular expression, which is compiled when it is first used: most programs never log such an error.
func form(text string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })
}

// ofStore is in errors of etcd's client, whose texts may end as errors of an HTTP client do:
// "rpc error: code = Unavailable desc = error reading from server: EOF".
var ofStore = form(`rpc error|etcdserver|Unavailable|etcdclient`)

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
		if has && ofStore().MatchString(fmt.Sprint(err)) {
			continue
		}
		if o.err == nil && (!has || err == nil) || o.err != nil && has && o.err().MatchString(fmt.Sprint(err)) {
			return true
		}
	}
	return false
}
