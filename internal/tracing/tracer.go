// Package tracing sends spans of changes to an OpenTelemetry collector: the write of an object at the API, for each
// node the time until its kernel has the change, and the acknowledgement.
//
// The ID of a trace is a hash of the object's UID and resource version, and so is the ID of its root span. So servers
// and nodes send spans of one trace without a word between them, and all decide alike which changes are sampled.
//
// Without a collector there is no Tracer: all methods do nothing for nil.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Options configure a Tracer.
type Options struct {
	// Endpoint is the URL of a collector that takes OTLP over gRPC; http has no TLS. Empty for none.
	Endpoint string
	// Sample is which part of the changes has spans, 0 to 1.
	Sample float64
	// Service is the name of this process in spans, Instance that of its machine, Version its version.
	Service, Instance, Version string
	// Log receives that spans cannot be sent.
	Log *slog.Logger
}

const (
	// queueSize bounds the spans that wait to be sent, and with maxValue their bytes: less than 8 MB.
	queueSize = 2048
	maxValue  = 512
	// sendAfter is how long a span waits for others at most, if all goes well.
	sendAfter = time.Second
	// sendTimeout bounds one request, giveUpAfter all tries of one batch.
	sendTimeout = 10 * time.Second
	giveUpAfter = time.Minute
	// flushTimeout bounds the time that a process takes at its end for its last spans.
	flushTimeout = 3 * time.Second
)

// Tracer sends spans. It is safe for concurrent use.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	sampler  sdktrace.Sampler
	sender   *sender
}

// Check rejects options that cannot work. It sends nothing.
func (o *Options) Check() error {
	u, err := url.Parse(o.Endpoint)
	switch {
	case !(o.Sample >= 0 && o.Sample <= 1): // not so for NaN
		return fmt.Errorf("--otlp-sample is %v; want 0 to 1", o.Sample)
	case o.Endpoint == "":
		return nil
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" ||
		u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Path != "" && u.Path != "/":
		return fmt.Errorf("--otlp-endpoint is %q; want https://HOST:PORT, or http://HOST:PORT without TLS", o.Endpoint)
	}
	return nil
}

// Open returns a Tracer that connects when it has something to send; nil without an endpoint.
func Open(o Options) (*Tracer, error) {
	if err := o.Check(); err != nil || o.Endpoint == "" || o.Sample == 0 {
		return nil, err
	}
	exporter, err := otlptracegrpc.New(context.Background(), otlptracegrpc.WithEndpointURL(o.Endpoint),
		otlptracegrpc.WithTimeout(sendTimeout), otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{}))
	if err != nil {
		return nil, fmt.Errorf("--otlp-endpoint: %w", err)
	}
	return open(o, newSender(exporter, o.Endpoint, o.Log))
}

func open(o Options, s *sender) (*Tracer, error) {
	about, err := resource.New(context.Background(), resource.WithFromEnv(), resource.WithAttributes(
		attribute.String("service.name", o.Service), attribute.String("service.instance.id", o.Instance),
		attribute.String("service.version", o.Version)))
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("attributes of spans: %w", err)
	}
	limits := sdktrace.NewSpanLimits()
	limits.AttributeValueLengthLimit = maxValue
	p := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(s, sdktrace.WithMaxQueueSize(queueSize), sdktrace.WithBatchTimeout(sendAfter),
			sdktrace.WithExportTimeout(giveUpAfter)),
		sdktrace.WithResource(about), sdktrace.WithIDGenerator(generator{}), sdktrace.WithRawSpanLimits(limits),
		sdktrace.WithSampler(sdktrace.AlwaysSample())) // what is not sampled gets no span
	return &Tracer{provider: p, tracer: p.Tracer("fairlead"), sampler: sdktrace.TraceIDRatioBased(o.Sample), sender: s}, nil
}

// Run waits until ctx ends, and sends the last spans then, within a bound.
func (t *Tracer) Run(ctx context.Context) error {
	<-ctx.Done()
	t.Close()
	return nil
}

// Close sends the last spans, within a bound.
func (t *Tracer) Close() {
	if t == nil {
		return
	}
	t.sender.last()
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.sender.log.Warn("some spans were not sent", "err", err)
	}
	t.sender.cancel()
}

// Sampled reports whether a change has spans.
func (t *Tracer) Sampled(c Change) bool {
	return t != nil && t.sampled(c.identity())
}

func (t *Tracer) sampled(id identity) bool {
	return t.sampler.ShouldSample(sdktrace.SamplingParameters{TraceID: id.trace}).Decision == sdktrace.RecordAndSample
}

// Written sends the root span of a change: a request was received at a time and the store has what it wrote at another. What is
// such as "create Service".
func (t *Tracer) Written(c Change, what string, received, stored time.Time) {
	if t == nil {
		return
	}
	id := c.identity()
	if !t.sampled(id) {
		return
	}
	_, span := t.tracer.Start(id.asRoot(), what, trace.WithNewRoot(), trace.WithTimestamp(received),
		trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(c.attributes()...))
	span.End(trace.WithTimestamp(stored))
}

// Acknowledged sends the span of a change from when it was first awaited until a number of nodes had reported it, which are all.
func (t *Tracer) Acknowledged(c Change, awaited, reported time.Time, nodes int) {
	if t == nil {
		return
	}
	id := c.identity()
	if !t.sampled(id) {
		return
	}
	_, span := t.tracer.Start(id.underRoot(), "acknowledge", trace.WithTimestamp(awaited),
		trace.WithSpanKind(trace.SpanKindInternal), trace.WithAttributes(append(c.attributes(), attribute.Int("fairlead.nodes", nodes))...))
	span.End(trace.WithTimestamp(reported))
}
