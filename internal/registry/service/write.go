package service

import (
	"context"
	"errors"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/fairlead/fairlead/internal/registry/service/allocator"
)

// write follows one create or update of a Service through all its attempts.
//
// The generic store calls an update's finish function before it writes, and
// repeats the whole when the write proves to conflict with another; its finish
// function of a create does not learn why the create failed. Releasing an address
// at that time could give it to a second Service while the first still has it.
// So the transaction is settled only when the store has returned.
type write struct {
	// last is the transaction of the last attempt, nil when there is none.
	last *allocator.Transaction
	// finished is set when the last attempt reported success, which for a create
	// is after its write and for an update before.
	finished bool
	// reached is set when everything before the write to etcd succeeded.
	reached bool
}

type writeKey struct{}

// DefaultWriteTimeout is the longest that a write may take, whatever its
// request allows: the repair frees claims that are older and have no Service.
const DefaultWriteTimeout = time.Minute

// withWrite returns a context that carries a new write and ends in time.
func withWrite(ctx context.Context, limit time.Duration) (context.Context, *write, context.CancelFunc) {
	w := &write{}
	ctx, cancel := context.WithTimeout(context.WithValue(ctx, writeKey{}, w), limit)
	return ctx, w, cancel
}

// writeOf returns the write of ctx.
func writeOf(ctx context.Context) *write {
	if w, ok := ctx.Value(writeKey{}).(*write); ok {
		return w
	}
	// Only REST.Create and REST.Update lead to the hooks that ask.
	return &write{}
}

// restart begins another attempt. The store repeats only what certainly was not
// written, so what the attempt before has claimed is released.
func (w *write) restart(ctx context.Context) {
	if w.last != nil {
		w.last.Revert(ctx)
	}
	*w = write{}
}

// finish is the finish function of the generic store.
func (w *write) finish(_ context.Context, success bool) { w.finished = success }

// settle commits or reverts the last attempt after the store returned err, or
// abandons it if it is unknown whether the write happened.
func (w *write) settle(ctx context.Context, err error) {
	switch {
	case w.last == nil:
	case err == nil && w.finished:
		w.last.Commit(ctx)
	case err == nil, !w.finished && !w.reached, rejected(err):
		w.last.Revert(ctx)
	default:
		w.last.Abandon(err)
	}
}

// rejected reports whether err means that certainly nothing was written: any
// answer that blames the request.
func rejected(err error) bool {
	var answer apierrors.APIStatus
	if !errors.As(err, &answer) {
		return false
	}
	code := answer.Status().Code
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout
}
