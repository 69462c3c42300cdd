package pod

import (
	"context"

	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// podREST remembers for the strategy which grace period a deletion asks for. The
// generic store hands the strategy one DeleteOptions for all of its tries, and the
// first may be with a Pod from a cache that has not seen its binding: the zero
// that the strategy writes for such a Pod was taken for the client's, and the
// processes were killed without time to end.
type podREST struct{ *store.REST }

// graceKey is the context's key of the *int64 that a deletion asks for.
type graceKey struct{}

func withAskedGrace(ctx context.Context, options *metav1.DeleteOptions) context.Context {
	if options == nil {
		return ctx
	}
	var asked *int64
	if options.GracePeriodSeconds != nil {
		asked = new(*options.GracePeriodSeconds)
	}
	return context.WithValue(ctx, graceKey{}, asked)
}

// askedGrace returns the seconds that the deletion of ctx asks for, nil if it asks
// for none, and whether ctx is that of a deletion.
func askedGrace(ctx context.Context) (*int64, bool) {
	asked, ok := ctx.Value(graceKey{}).(*int64)
	return asked, ok
}

// Delete implements rest.GracefulDeleter.
func (r *podREST) Delete(
	ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions,
) (runtime.Object, bool, error) {
	return r.REST.Delete(withAskedGrace(ctx, options), name, validate, options)
}

// DeleteCollection implements rest.CollectionDeleter.
func (r *podREST) DeleteCollection(
	ctx context.Context, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions, list *metainternal.ListOptions,
) (runtime.Object, error) {
	return r.REST.DeleteCollection(withAskedGrace(ctx, options), validate, options, list)
}
