package base

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

// What the Kubernetes libraries call an error and is ordinary use is shown at level
// debug alone; other errors of theirs with the same words stay.
func TestLibraryErrors(t *testing.T) {
	reset := &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}
	all := runtime.ErrorHandlers
	defer func() { runtime.ErrorHandlers = all }()
	runtime.ErrorHandlers = runtime.ErrorHandlers[:1] // without its rate limit
	log := func(level string, do func()) string {
		var out bytes.Buffer
		g := &Global{Streams: Streams{Err: &out}, LogLevel: level, LogFormat: "text"}
		if _, err := g.Logger(); err != nil {
			t.Fatal(err)
		}
		defer klog.SetSlogLogger(slog.New(slog.DiscardHandler))
		do()
		return out.String()
	}
	ctx, watchCanceled := context.Background(), &url.Error{Op: "Get", URL: "https://127.0.0.1/api/v1/nodes?watch=true", Err: context.Canceled}
	for name, x := range map[string]struct {
		do       func()
		ordinary bool
	}{
		"end of an exec":      {func() { klog.FromContext(ctx).Error(reset, "Error on socket receive") }, true},
		"broken exec":         {func() { klog.FromContext(ctx).Error(errors.New("bad frame"), "Error on socket receive") }, false},
		"interrupted":         {func() { klog.Background().Error(reset, "Error proxying data from client to backend") }, true},
		"no listener":         {func() { runtime.HandleError(errors.New("error forwarding port 1 to pod x, uid : refused")) }, true},
		"end of the agent":    {func() { runtime.HandleError(errors.New("error executing command in container: context canceled")) }, true},
		"aborted":             {func() { runtime.HandleErrorWithContext(ctx, nil, "Timeout or abort while handling", "method", "PATCH") }, true},
		"after an abort":      {func() { runtime.HandleErrorWithContext(ctx, nil, "Post-timeout activity", "result", nil) }, true},
		"panic after one":     {func() { runtime.HandleErrorWithContext(ctx, nil, "Post-timeout activity", "result", "boom") }, false},
		"unread answer":       {func() { runtime.HandleError(fmt.Errorf("apiserver was unable to write a JSON response: %w", reset)) }, true},
		"half a request":      {func() { notStatus(io.ErrUnexpectedEOF) }, true},
		"store is away":       {func() { notStatus(errors.New(storeAway)) }, false},
		"programming error":   {func() { notStatus(errors.New("no such column")) }, false},
		"watch at the end":    {func() { runtime.HandleErrorWithContext(ctx, watchCanceled, "Failed to watch", "type", "*v1.Node") }, true},
		"broken watch":        {func() { runtime.HandleErrorWithContext(ctx, reset, "Failed to watch", "type", "*v1.Node") }, false},
		"end of definitions":  {func() { definition(watchCanceled) }, true},
		"broken definition":   {func() { definition(reset) }, false},
		"no leader for now":   {func() { klog.Errorf("watch chan error: %v", errors.New("etcdserver: no leader")) }, true},
		"other watch error":   {func() { klog.Errorf("watch chan error: %v", errors.New("etcdserver: corrupt cluster")) }, false},
		"any other error":     {func() { klog.Background().Error(reset, "cannot listen") }, false},
		"canceled after":      {func() { finish("context canceled", false) }, true},
		"time out after":      {func() { finish("context deadline exceeded", false) }, false},
		"answered late":       {func() { finish("<nil>", false) }, true},
		"panic in the answer": {func() { finish("context canceled", true) }, false},
	} {
		if got := log("info", x.do); (got == "") != x.ordinary {
			t.Errorf("%s: logged %q", name, got)
		}
		if got := log("debug", x.do); x.ordinary != strings.Contains(got, "level=DEBUG") || got == "" {
			t.Errorf("%s: logged %q at level debug", name, got)
		}
	}
}

// storeAway is what etcd's client returns while etcd restarts.
const storeAway = "rpc error: code = Unavailable desc = error reading from server: EOF"

func definition(err error) {
	runtime.HandleError(fmt.Errorf("%v failed with: %w", "httproutes.gateway.networking.k8s.io", err))
}

func notStatus(err error) {
	runtime.HandleError(fmt.Errorf("apiserver received an error that is not an metav1.Status: %#+v: %w", err, err))
}

func finish(err string, panicked bool) {
	runtime.HandleError(fmt.Errorf(
		"FinishRequest: post-timeout activity - time-elapsed: 1ms, panicked: %t, err: %s, panic-reason: <nil>", panicked, err))
}
