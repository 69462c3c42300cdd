package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/fairlead/fairlead/internal/table"
)

// maxErrors bounds how many errors a joined one tells.
const maxErrors = 10

// JoinErrors joins errors and keeps the text bounded.
func JoinErrors(errs []error) error {
	if n := len(errs) - maxErrors; n > 0 {
		errs = append(errs[:maxErrors:maxErrors], fmt.Errorf("and %d more", n))
	}
	return errors.Join(errs...)
}

// Rejected is the error of an Apply that wrote everything but some service ports,
// which are as they were before, or partly so.
type Rejected struct {
	// Ports says for each of them what is wrong. It is not empty.
	Ports map[table.Key]error
}

// Error returns what is wrong with each port, in the order of their names.
func (r *Rejected) Error() string { return JoinErrors(r.Unwrap()).Error() }

// Unwrap returns what is wrong with each port, in the order of their names.
func (r *Rejected) Unwrap() []error {
	var errs []error
	for _, k := range slices.SortedFunc(maps.Keys(r.Ports), compareKeys) {
		errs = append(errs, r.Ports[k])
	}
	return slices.CompactFunc(errs, errors.Is) // ports of one refusal share its error
}

func compareKeys(a, b table.Key) int {
	if c := a.ID.Compare(b.ID); c != 0 {
		return c
	}
	return int(a.Family) - int(b.Family)
}

// Rejections collects what an Apply could not write. The zero value is empty.
type Rejections struct{ ports map[table.Key]error }

// Add notes that the port with key k could not be written. The first error of a
// port counts.
func (r *Rejections) Add(k table.Key, err error) {
	if r.ports == nil {
		r.ports = map[table.Key]error{}
	}
	if r.ports[k] == nil {
		r.ports[k] = err
	}
}

// Merge adds those of o.
func (r *Rejections) Merge(o *Rejections) {
	for k, err := range o.ports {
		r.Add(k, err)
	}
}

// Has says whether the port with key k was noted.
func (r *Rejections) Has(k table.Key) bool { return r.ports[k] != nil }

// Len is the number of ports noted.
func (r *Rejections) Len() int { return len(r.ports) }

// Err is the error of an Apply whose other errors are errs: nil if there are
// none at all, a *Rejected if there are only refused ports, else all of them
// joined in a way that hides the *Rejected, since then the caller knows nothing
// of the other ports.
func (r *Rejections) Err(errs ...error) error {
	switch {
	case len(r.ports) == 0:
		return JoinErrors(errs)
	case len(errs) == 0:
		return &Rejected{Ports: r.ports}
	}
	return JoinErrors(append(slices.Clip(errs), (&Rejected{Ports: r.ports}).Unwrap()...))
}

// Both is the error of an Apply made of parts that returned errs, such as one
// for each address family: nil, a *Rejected with the ports of all of them, or,
// if any part failed otherwise, all joined with nothing to be found by
// errors.As.
func Both(errs ...error) error {
	var all Rejections
	var others []error
	for _, err := range errs {
		var r *Rejected
		switch {
		case err == nil:
		case errors.As(err, &r):
			for k, why := range r.Ports {
				all.Add(k, why)
			}
		default:
			others = append(others, err)
		}
	}
	return all.Err(others...)
}
