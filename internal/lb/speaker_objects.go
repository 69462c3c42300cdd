package lb

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/fairlead/fairlead/internal/reflector"
)

// oneObject is what becomes of an object that is followed by its name: a node has no right to list others.
type oneObject[T any] struct {
	set func(T)
	// gone is called with why there is none, for an Event.
	gone func(problem string)
	// kept reports whether an earlier one goes on while it cannot be read.
	kept func() bool
	// warn logs that it cannot be read, once for each reason.
	warn func(error)
}

// byName selects an object.
func byName(name string) metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()}
}

// followObject follows an object until ctx ends. of names what it is in metrics and logs.
func followObject[T any](ctx context.Context, running *sync.WaitGroup, of string, from reflector.Source, to oneObject[T]) {
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
	last := "" // of what follows, which is called for one request after the other
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
	running.Go(func() { reflector.Run(ctx, of, observed, sink) })
}
