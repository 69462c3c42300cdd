package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// sender tries again what could not be sent, and logs that once until it works again. Only one batch is sent at a time.
type sender struct {
	next sdktrace.SpanExporter
	to   string
	log  *slog.Logger

	// ctx ends when nothing is sent any more. ending is closed before: nothing is tried again.
	ctx    context.Context
	cancel context.CancelFunc
	ending chan struct{}
	last   func()

	retryMin, retryMax time.Duration
	failing            bool
	wait               time.Duration // before the next try
}

func newSender(next sdktrace.SpanExporter, to string, log *slog.Logger) *sender {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &sender{next: next, to: to, log: log, ending: make(chan struct{}), retryMin: time.Second, retryMax: 30 * time.Second}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.last = sync.OnceFunc(func() { close(s.ending) })
	s.wait = s.retryMin
	return s
}

// retried are the codes with which a collector asks to be tried again.
var retried = []codes.Code{codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Aborted, codes.Canceled}

// ExportSpans sends spans, until ctx ends. What cannot be sent is dropped: an error would only be logged a second time.
func (s *sender) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	for {
		err := s.next.ExportSpans(ctx, spans)
		if err == nil {
			if s.failing {
				s.log.Info("spans are sent again", "to", s.to)
			}
			s.failing, s.wait = false, s.retryMin
			return nil
		}
		of, ok := status.FromError(err)
		again := ok && slices.Contains(retried, of.Code()) || ctx.Err() != nil
		s.failed(err, again)
		if !again {
			return nil
		}
		pause := time.NewTimer(s.wait)
		s.wait = min(2*s.wait, s.retryMax)
		select {
		case <-pause.C:
		case <-s.ending:
		case <-ctx.Done():
		}
		pause.Stop()
		select {
		case <-s.ending:
			return nil
		case <-ctx.Done():
			return nil
		default:
		}
	}
}

func (s *sender) failed(err error, again bool) {
	if s.failing {
		return
	}
	s.failing = true
	then := "these are dropped"
	if again {
		then = fmt.Sprintf("retrying in %s", s.wait)
	}
	s.log.Warn(fmt.Sprintf("cannot send spans to %s: %v; %s", s.to, err, then))
}

// Shutdown ends the connection.
func (s *sender) Shutdown(ctx context.Context) error { return s.next.Shutdown(ctx) }
