package watch

import (
	"context"
	"testing"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// askedContext counts how often it is asked for its channel.
type askedContext struct {
	context.Context //nolint:containedctx // a context itself
	asked           *int
}

// Done counts.
func (c askedContext) Done() <-chan struct{} {
	*c.asked++
	return c.Context.Done()
}

// busyWatch is a storage whose watches ask for the channel at each event.
type busyWatch struct{ storage.Interface }

// Watch sends nothing.
func (busyWatch) Watch(ctx context.Context, _ string, _ storage.ListOptions) (watch.Interface, error) {
	for range 1000 {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		default:
		}
	}
	child, cancel := context.WithCancel(ctx)
	defer cancel()
	return nil, child.Err()
}

// The context of a request is asked once for a watch, and its end and its values are
// those of the watch.
func TestWatchAsksContextOnce(t *testing.T) {
	t.Parallel()
	type key struct{}
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
	asked := 0
	request := askedContext{ctx, &asked}
	if _, err := (nearWatches{busyWatch{}}).Watch(request, "", storage.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	near := nearContext{ctx, ctx.Done()}
	child, stop := context.WithCancel(near)
	defer stop()
	if child.Value(key{}) != "value" {
		t.Error("the watch has not the values of the request")
	}
	cancel()
	<-child.Done()
	if near.Err() == nil {
		t.Error("the watch does not end with the request")
	}
}
