package trust

import (
	"fmt"

	"github.com/fairlead/fairlead/internal/svc"
)

// The kinds of objects that have certificates.
const (
	ConfigMap = "ConfigMap"
	Secret    = "Secret"
)

// Entry of a ConfigMap or of a Secret has the certificates of authorities, in PEM, as cert-manager and Kubernetes have them.
const Entry = "ca.crt"

// Ref names a ConfigMap or a Secret.
type Ref struct {
	Kind string
	svc.Name
}

// String returns the kind and the name.
func (r Ref) String() string { return r.Kind + " " + r.Name.String() }

// maxAuthorities bounds the objects of a namespace that are followed for a Gateway. Each is a watch on each node, and who
// may write in a namespace must not use up what another namespace needs.
const maxAuthorities = 256

// Authorities are the objects with authorities that a Gateway and the policies of its backends name.
type Authorities struct {
	// known is why an object cannot be used, "" if it can. It lacks objects that do not exist.
	known    map[Ref]string
	problems map[Ref]string
	count    map[string]int // by namespace
	named    []Ref
	usable   []Ref
}

// NewAuthorities returns an empty list. known is why an object cannot be used, "" if it can; it lacks what does not exist.
func NewAuthorities(known map[Ref]string) *Authorities {
	return &Authorities{known: known, problems: map[Ref]string{}, count: map[string]int{}}
}

// Add returns why an object cannot be used, "" if it can.
func (a *Authorities) Add(r Ref) string {
	if problem, seen := a.problems[r]; seen {
		return problem
	}
	if a.count[r.Namespace] == maxAuthorities {
		return fmt.Sprintf("namespace %s has more than %d objects with certificates of authorities", r.Namespace, maxAuthorities)
	}
	a.count[r.Namespace]++
	a.named = append(a.named, r)
	problem, known := a.known[r]
	switch {
	case !known:
		problem = "it does not exist"
	case problem == "":
		a.usable = append(a.usable, r)
	}
	a.problems[r] = problem
	return problem
}

// Named returns the objects that must be followed.
func (a *Authorities) Named() []Ref { return a.named }

// Usable returns the objects that nodes need.
func (a *Authorities) Usable() []Ref { return a.usable }
