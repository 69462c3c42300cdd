package base

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
)

// Paged lists a kind page by page, and returns the items that keep wants. The others are in memory for one page only.
func Paged[L runtime.Object, T any](ctx context.Context, o metav1.ListOptions, list func(context.Context, metav1.ListOptions) (L, error),
	keep func(*T) bool) (out []*T, err error) {
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) })
	pages.PageBufferSize = 1
	err = pages.EachListItemWithAlloc(ctx, o, func(item runtime.Object) error {
		if t, ok := any(item).(*T); ok && (keep == nil || keep(t)) {
			out = append(out, t)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
