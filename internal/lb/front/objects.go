package front

import (
	"context"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/fairlead/fairlead/internal/reflector"
)

// oneObject handles an object that is followed by its name: a node has no right to list others.
type oneObject[T any] struct {
	set func(T)
	// gone is called with the reason why there is no object, for an Event.
	gone func(problem string)
	// kept reports whether an earlier object is used while this one cannot be read.
	kept func() bool
	// warn logs that the object cannot be read, once for each reason.
	warn func(error)
}

// byName selects an object.
func byName(name string) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()}
}

// followObject follows an object until ctx ends. kind names it in metrics and logs.
func followObject[T any](ctx context.Context, running *sync.WaitGroup, kind string, from reflector.Source, to oneObject[T]) {
	sink := reflector.Sink[T]{
		Replace: func(list []T) {
			if len(list) == 0 {
				to.gone("it does not exist")
				return
			}
			to.set(list[0])
		},
		Set:    to.set,
		Delete: func(T) { to.gone("it was deleted") },
	}
	last := "" // only observed uses it, for one request after the other
	observed := from.Observed(func(err error) {
		if ctx.Err() != nil {
			return
		}
		problem := readProblem(err)
		if problem != "" && problem != last {
			to.warn(err)
			if !to.kept() {
				to.gone(problem)
			}
		}
		last = problem
	})
	running.Go(func() { reflector.Run(ctx, kind, observed, sink) })
}

// readProblem returns what an Event reports about an error of reading an object, "" for none. The error's text is not for
// everyone who reads the Events of a Service: it has the node's user and addresses, and a port that changes each time.
func readProblem(err error) string {
	switch {
	case err == nil:
		return ""
	case apierrors.IsForbidden(err):
		return "reading it is forbidden"
	case apierrors.IsNotFound(err):
		return "it does not exist"
	default:
		return "it cannot be read"
	}
}

// follower is an object that is followed until stop is called.
type follower interface{ end() }

// followNamed makes have contain the named objects, and no others. The caller holds the Front's mu.
func followNamed[K comparable, V follower](have map[K]V, named map[K]bool, start func(K) V) {
	for k, v := range have {
		if !named[k] {
			v.end()
			delete(have, k)
		}
	}
	for k := range named {
		if _, has := have[k]; !has {
			have[k] = start(k)
		}
	}
}
