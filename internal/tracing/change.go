package tracing

import (
	"context"
	"crypto/sha256"
	"math/rand/v2"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Change is one write of one object: the object as it was after that.
type Change struct {
	// Kind is Service or EndpointSlice.
	Kind                                  string
	Namespace, Name, UID, ResourceVersion string
}

// ChangeOf returns the write of an object that made it as it is.
func ChangeOf(kind string, o metav1.Object) Change {
	return Change{kind, o.GetNamespace(), o.GetName(), string(o.GetUID()), o.GetResourceVersion()}
}

// identity are the IDs that everyone derives from a Change: of the trace, and of its root span. No node has to be told.
type identity struct {
	trace trace.TraceID
	root  trace.SpanID
}

func (c *Change) identity() (id identity) {
	sum := sha256.Sum256([]byte(c.UID + "/" + c.ResourceVersion))
	copy(id.trace[:], sum[:16])
	copy(id.root[:], sum[16:24])
	return id
}

// underRoot is a context in which a span is a child of the root.
func (id identity) underRoot() context.Context {
	return trace.ContextWithRemoteSpanContext(context.Background(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: id.trace, SpanID: id.root, TraceFlags: trace.FlagsSampled, Remote: true,
	}))
}

func (c *Change) attributes() []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("k8s.object.kind", c.Kind),
		attribute.String("k8s.object.name", c.Name),
		attribute.String("k8s.namespace.name", c.Namespace),
		attribute.String("k8s.object.uid", c.UID),
		attribute.String("k8s.object.resource_version", c.ResourceVersion),
	}
}

type identityKey struct{}

// asRoot is a context in which a span is the root.
func (id identity) asRoot() context.Context {
	return context.WithValue(context.Background(), identityKey{}, id)
}

// generator gives a root span the IDs of its context, and all others an ID by chance.
type generator struct{}

// NewIDs returns the IDs of a root span.
func (generator) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	if id, ok := ctx.Value(identityKey{}).(identity); ok {
		return id.trace, id.root
	}
	var id trace.TraceID
	for i := range id {
		id[i] = byte(rand.IntN(255) + 1)
	}
	return id, generator{}.NewSpanID(ctx, id)
}

// NewSpanID returns the ID of a span with a parent.
func (generator) NewSpanID(context.Context, trace.TraceID) (id trace.SpanID) {
	for i := range id {
		id[i] = byte(rand.IntN(256))
	}
	id[0] |= 1 // 0 is no ID
	return id
}
