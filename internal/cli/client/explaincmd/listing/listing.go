// Package listing reads the objects of a plan, kind by kind: of all namespaces, or, where the user may not, of each namespace that may
// concern the plan. It knows what could not be read, and reports the progress of long work.
package listing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// mostNamespaces bounds the namespaces that are tried one by one, each with a request for each kind.
const mostNamespaces = 200

// quiet is how long work goes on without a word.
const quiet = 2 * time.Second

// Reader reads the objects of a plan. It is for one goroutine.
type Reader struct {
	// Tell is called with what is being read, not more often than once in Each. It may be nil.
	Tell func(text string)
	Each time.Duration

	namespaces []string
	own        int // so many of namespaces are the plan's own
	left       int // namespaces that are not tried
	refused    map[string][]string
	failed     error

	mu      sync.Mutex // guards what pages are counted in: a pager reads ahead
	pending []string
	now     string
	count   int
	// compares is set once all is read.
	compares bool
	told     time.Time
}

// New returns a Reader for a plan with objects in some namespaces. others are namespaces that the objects name, or that the user may
// list: what these refuse is not a problem of the plan.
func New(own, others []string) *Reader {
	r := &Reader{Each: quiet, refused: map[string][]string{}, told: time.Now()}
	for i, list := range [][]string{own, others} {
		for _, n := range list {
			switch {
			case n == "" || slices.Contains(r.namespaces, n):
			case len(r.namespaces) == mostNamespaces:
				r.left++
			default:
				r.namespaces = append(r.namespaces, n)
			}
		}
		if i == 0 {
			r.own = len(r.namespaces)
		}
	}
	return r
}

// Expect adds what will be read, in the order in which it will be.
func (r *Reader) Expect(what ...string) { r.pending = append(r.pending, what...) }

// Begin notes what is being read now. After a failure nothing more is read.
func (r *Reader) Begin(what string) {
	if r.failed != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending = slices.DeleteFunc(r.pending, func(p string) bool { return p == what })
	r.now, r.count = what, 0
}

// Count notes so many objects more, and reports the progress of long work.
func (r *Reader) Count(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count += n
	if r.Tell != nil && time.Since(r.told) >= r.Each {
		r.told = time.Now()
		r.Tell(fmt.Sprintf("%s: %d read so far", r.now, r.count))
	}
}

// Compare notes that all is read, and is compared now.
func (r *Reader) Compare() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed == nil {
		r.now, r.compares = "", true
	}
}

// End notes that nothing is being read any more. After a failure it does nothing.
func (r *Reader) End() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed == nil {
		r.now = ""
	}
}

// Late returns an error in place of one that came because the time was over: it names what was not read, or that all was. limit is what
// the user gave.
func (r *Reader) Late(ctx context.Context, err error, limit time.Duration) error {
	if err == nil || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var missing []string
	if r.now != "" {
		missing = append(missing, fmt.Sprintf("%s (only %d)", r.now, r.count))
	}
	missing = append(missing, r.pending...)
	text := ""
	switch {
	case len(missing) > 0:
		text = "; not read: " + strings.Join(missing, ", ")
	case r.compares:
		text = "; all was read, and not all compared"
	}
	return fmt.Errorf("the plan was not made within %s, and nothing is known of what would change%s. Give it more time with --timeout", limit,
		text)
}

// Failed is the first list that failed otherwise than for want of rights; a plan without these objects would be wrong.
func (r *Reader) Failed() error { return r.failed }

// None reports whether the user may list a kind in no namespace of the plan.
func (r *Reader) None(kind string) bool {
	refused, partly := r.refused[kind]
	return partly && len(refused) == len(r.namespaces)
}

// Beyond reports of which namespaces a kind could not be read, nil if of none.
func (r *Reader) Beyond(kind string) func(namespace string) bool {
	refused, partly := r.refused[kind]
	if !partly {
		return nil
	}
	return func(n string) bool { return !slices.Contains(r.namespaces, n) || slices.Contains(refused, n) }
}

// Own returns the refused namespaces of a kind that are the plan's own.
func (r *Reader) Own(kind string) (out []string) {
	for _, n := range r.refused[kind] {
		if slices.Contains(r.namespaces[:r.own], n) {
			out = append(out, n)
		}
	}
	return out
}

// Partly returns the kinds among some that could not be read in all namespaces, the namespaces of which they were read, and the others.
// what is "" if there is no such kind.
func (r *Reader) Partly(kinds ...string) (what, has, lacks string) {
	kinds = slices.DeleteFunc(slices.Clone(kinds), func(k string) bool { return r.refused[k] == nil })
	if len(kinds) == 0 {
		return "", "", ""
	}
	var read, unread []string
	for _, n := range r.namespaces {
		if slices.ContainsFunc(kinds, func(k string) bool { return slices.Contains(r.refused[k], n) }) {
			unread = append(unread, n)
		} else {
			read = append(read, n)
		}
	}
	if has = few(read, 0); has == "" {
		has = "no namespace"
	}
	return strings.Join(kinds, ", "), has, few(unread, r.left)
}

// few names some of many namespaces, "" for none.
func few(names []string, more int) string {
	const named = 8
	if rest := len(names) - named; rest > 0 {
		names, more = names[:named], more+rest
	}
	names = slices.Clone(names)
	if more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return strings.Join(names, ", ")
}

// Func lists a page of a kind.
type Func[L runtime.Object] func(context.Context, metav1.ListOptions) (L, error)

// List reads the objects of a kind in all namespaces, or, if the user may not, in the ones of the plan, as Beyond and Partly have it. A
// kind that is not served has no objects.
func List[L runtime.Object, T any](ctx context.Context, r *Reader, kind string, of func(namespace string) Func[L]) (out []*T) {
	r.Begin(kind)
	defer r.End()
	one := func(namespace string) error {
		all, err := page[L, T](ctx, r, of(namespace))
		out = append(out, all...)
		return err
	}
	err := one(metav1.NamespaceAll)
	switch {
	case apierrors.IsForbidden(err):
		r.refused[kind] = []string{}
		for _, n := range r.namespaces {
			switch err := one(n); {
			case apierrors.IsForbidden(err):
				r.refused[kind] = append(r.refused[kind], n)
			default:
				r.fail(kind, err)
			}
		}
	default:
		r.fail(kind, err)
	}
	return out
}

// Whole reads the objects of a kind without namespaces. may is false if the user may not list them.
func Whole[L runtime.Object, T any](ctx context.Context, r *Reader, kind string, of Func[L]) (out []*T, may bool) {
	r.Begin(kind)
	defer r.End()
	out, err := page[L, T](ctx, r, of)
	if apierrors.IsForbidden(err) {
		return nil, false
	}
	r.fail(kind, err)
	return out, true
}

func (r *Reader) fail(kind string, err error) {
	if err != nil && !apierrors.IsNotFound(err) && r.failed == nil {
		r.failed = fmt.Errorf("cannot read %s: %w", kind, err)
	}
}

// page lists a kind page by page, and counts.
func page[L runtime.Object, T any](ctx context.Context, r *Reader, of Func[L]) ([]*T, error) {
	if r.failed != nil {
		return nil, nil // there will be no plan
	}
	return base.Paged[L, T](ctx, metav1.ListOptions{}, func(ctx context.Context, o metav1.ListOptions) (L, error) {
		ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
		defer cancel()
		list, err := of(ctx, o)
		if err == nil {
			r.Count(meta.LenList(list))
		}
		return list, err
	}, nil)
}
