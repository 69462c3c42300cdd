// Package fronts decides at which front an Ingress is served: at the one that all Ingresses share, or at one of the Ingress itself. It
// is pure.
package fronts

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/svc"
)

// Annotation of an Ingress names its front by one of the values below. Without it the front is the shared one.
const (
	Annotation = svc.Domain + "/front"
	Own        = "own"
	Shared     = "shared"
)

// maxTypos is how many letters of a name may differ from Annotation: an Ingress that asks for an address for itself must not come to
// everybody's.
const maxTypos = 2

// Split is which Ingresses are at which front. It does not change.
type Split struct {
	spaces map[string]*space                  // by namespace
	shared map[svc.Name]*networkingv1.Ingress // at the shared front
}

// space is the part of a Split for a namespace: no Ingress has a say about the front of an Ingress of another one. It does not change.
type space struct {
	all map[svc.Name]*networkingv1.Ingress
	// ingresses are at each front, by the name of the Ingress that has it for itself, or by names.SharedFront.
	ingresses map[svc.Name]map[svc.Name]*networkingv1.Ingress
	// problems is why an Ingress is at no front, and ignored are the annotations without effect there.
	problems, ignored map[svc.Name]string
	// at has the fronts of the Ingresses that are not at the shared one only.
	at map[svc.Name][]svc.Name
}

// Of returns the fronts of Ingresses.
func Of(all map[svc.Name]*networkingv1.Ingress) *Split {
	var none Split
	s, _ := none.Next(all, nil)
	return s
}

// Next returns the fronts after some Ingresses have changed, nil for one that has gone, and which fronts are not as they were. alike are
// the ones of them that only have another status. What it costs follows the namespaces of these Ingresses, and the Ingresses at the
// shared front if one of them is there.
func (s *Split) Next(changes map[svc.Name]*networkingv1.Ingress, alike map[svc.Name]bool) (next *Split, changed map[svc.Name]bool) {
	next = &Split{spaces: maps.Clone(s.spaces), shared: s.shared}
	if next.spaces == nil {
		next.spaces = map[string]*space{}
	}
	some := map[string]map[svc.Name]*networkingv1.Ingress{}
	for n, in := range changes {
		if some[n.Namespace] == nil {
			some[n.Namespace] = map[svc.Name]*networkingv1.Ingress{}
		}
		some[n.Namespace][n] = in
	}
	changed = map[svc.Name]bool{}
	shared := &copied{of: s.shared}
	for namespace, objects := range some {
		before := cmp.Or(s.spaces[namespace], &space{})
		all := maps.Clone(before.all)
		if all == nil {
			all = make(map[svc.Name]*networkingv1.Ingress, len(objects))
		}
		for n, in := range objects {
			if all[n] = in; in == nil {
				delete(all, n)
			}
		}
		maps.DeleteFunc(objects, func(n svc.Name, _ *networkingv1.Ingress) bool { return alike[n] })
		after := spaceOf(all)
		if next.spaces[namespace] = after; len(all) == 0 {
			delete(next.spaces, namespace)
		}
		mark(changed, before, after, objects)
		shared.replace(before.ingresses[names.SharedFront()], after.ingresses[names.SharedFront()])
	}
	next.shared = shared.of
	return next, changed
}

// copied is a map that is copied before its first change.
type copied struct {
	of  map[svc.Name]*networkingv1.Ingress
	own bool
}

// replace replaces a part of the map.
func (c *copied) replace(before, after map[svc.Name]*networkingv1.Ingress) {
	set := func(n svc.Name, in *networkingv1.Ingress) {
		if c.of[n] == in {
			return
		}
		if !c.own {
			c.own = true
			if c.of = maps.Clone(c.of); c.of == nil {
				c.of = map[svc.Name]*networkingv1.Ingress{}
			}
		}
		if c.of[n] = in; in == nil {
			delete(c.of, n)
		}
	}
	for n := range before {
		if after[n] == nil {
			set(n, nil)
		}
	}
	for n, in := range after {
		set(n, in)
	}
}

// mark adds the fronts that are not as they were before, since some Ingresses have changed.
func mark[T any](changed map[svc.Name]bool, before, after *space, ingresses map[svc.Name]T) {
	add := func(n svc.Name) {
		for _, f := range slices.Concat(before.frontsOf(n), after.frontsOf(n)) {
			changed[f] = true
		}
	}
	for n := range ingresses {
		add(n)
	}
	for _, some := range []*space{before, after} { // canaries move with others
		for n := range some.at {
			if !slices.Equal(before.frontsOf(n), after.frontsOf(n)) {
				add(n)
			}
		}
	}
}

// spaceOf returns the fronts of the Ingresses of a namespace.
func spaceOf(all map[svc.Name]*networkingv1.Ingress) *space {
	s := &space{
		all: all, ingresses: map[svc.Name]map[svc.Name]*networkingv1.Ingress{}, at: map[svc.Name][]svc.Name{},
		problems: map[svc.Name]string{}, ignored: map[svc.Name]string{},
	}
	canaries := map[svc.Name]*networkingv1.Ingress{}
	divided := false // there is an Ingress that has a front for itself
	for n, in := range all {
		own, wrong := Read(in.Annotations)
		canary := isCanary(in)
		if _, named := in.Annotations[Annotation]; named && canary && wrong == "" {
			wrong = "annotation " + Annotation + ": a canary has the front of the Ingress with its paths; remove the annotation"
		}
		switch {
		case wrong != "":
			s.problems[n], s.at[n] = wrong, nil
		case canary:
			canaries[n] = in
		case own:
			divided, s.at[n] = true, []svc.Name{n}
			s.put(n, n, in)
			if _, refused := dialect.OfFront(in.Annotations); len(refused) > 0 {
				s.ignored[n] = fmt.Sprintf("annotation %s has no effect: the Ingress has the protocols, certificates and paths of its front",
					strings.Join(refused, ", "))
			}
		default:
			s.put(names.SharedFront(), n, in)
			s.ignore(n, in)
		}
	}
	s.follow(canaries, divided)
	return s
}

func (s *space) put(front, n svc.Name, in *networkingv1.Ingress) {
	if s.ingresses[front] == nil {
		s.ingresses[front] = map[svc.Name]*networkingv1.Ingress{}
	}
	s.ingresses[front][n] = in
}

// ignore notes the annotations of an Ingress at the shared front that only a Service has.
func (s *space) ignore(n svc.Name, in *networkingv1.Ingress) {
	var keys []string
	for key := range in.Annotations {
		if dialect.IsOwn(key) && key != dialect.LBCompress {
			keys = append(keys, key)
		}
	}
	if slices.Sort(keys); len(keys) > 0 {
		s.ignored[n] = fmt.Sprintf("annotation %s has no effect without %s: %s", strings.Join(keys, ", "), Annotation, Own)
	}
}

// Read reports whether annotations ask for a front for the Ingress itself, and returns what is wrong with that, "" if nothing is.
func Read(annotations map[string]string) (own bool, wrong string) {
	value, named := annotations[Annotation]
	switch strings.ToLower(strings.TrimSpace(value)) {
	case Own:
		return true, ""
	case Shared:
		return false, ""
	}
	if named {
		return false, fmt.Sprintf("annotation %s: %.100q: want one of %s, %s; the Ingress has no address", Annotation, value, Own, Shared)
	}
	typo := ""
	for key := range annotations {
		if strings.HasPrefix(key, svc.Domain) && dialect.Nearest(key, []string{Annotation}, maxTypos) != "" && (typo == "" || key < typo) {
			typo = key
		}
	}
	if typo != "" {
		return false, fmt.Sprintf("annotation %s is unknown; is %s meant? The Ingress has no address until the name is right", typo, Annotation)
	}
	return false, ""
}

func isCanary(in *networkingv1.Ingress) bool {
	_, named := in.Annotations[nginx.Prefix+"canary"]
	return named && nginx.Read(in.Annotations).Canary != nil
}

// follow puts canaries to the fronts of the Ingresses that have one of their paths, or else to the shared one, where what is wrong with
// them is found. divided is true if there is more than one front.
func (s *space) follow(canaries map[svc.Name]*networkingv1.Ingress, divided bool) {
	mains := map[path][]svc.Name{} // fronts
	for n, in := range s.all {
		if fronts := s.frontsOf(n); divided && len(canaries) > 0 && len(fronts) > 0 && canaries[n] == nil {
			for _, p := range pathsOf(in) {
				mains[p] = append(mains[p], fronts...)
			}
		}
	}
	for n, in := range canaries {
		var fronts []svc.Name
		for _, p := range pathsOf(in) {
			fronts = append(fronts, mains[p]...)
		}
		slices.SortFunc(fronts, svc.Name.Compare)
		if fronts = slices.Compact(fronts); len(fronts) == 0 {
			fronts = []svc.Name{names.SharedFront()}
		}
		for _, f := range fronts {
			s.put(f, n, in)
		}
		if len(fronts) > 1 || fronts[0] != names.SharedFront() {
			s.at[n] = fronts
		}
	}
}

// path is a path of a host, by which a canary finds the Ingress that it stands beside.
type path struct {
	host, path string
	exact      bool
}

// pathsOf returns the paths of an Ingress. Prefixes that differ in a slash at the end are the same.
func pathsOf(in *networkingv1.Ingress) (out []path) {
	for i := range in.Spec.Rules {
		r := &in.Spec.Rules[i]
		if r.HTTP == nil {
			continue
		}
		for k := range r.HTTP.Paths {
			p := path{host: strings.ToLower(r.Host), path: cmp.Or(r.HTTP.Paths[k].Path, "/")}
			if canonical, ok := hostpath.Path(p.path); ok {
				p.path = canonical
			}
			kind := r.HTTP.Paths[k].PathType
			if p.exact = kind != nil && *kind == networkingv1.PathTypeExact; !p.exact {
				p.path = strings.TrimSuffix(p.path, "/")
			}
			out = append(out, p)
		}
	}
	return out
}

// frontsOf returns the fronts of an Ingress.
func (s *space) frontsOf(n svc.Name) []svc.Name {
	if list, other := s.at[n]; other {
		return list
	}
	if s.ingresses[names.SharedFront()][n] != nil {
		return []svc.Name{names.SharedFront()}
	}
	return nil
}

// in returns the part of a namespace, which may be empty.
func (s *Split) in(namespace string) *space {
	return cmp.Or(s.spaces[namespace], &space{})
}

// Ingresses returns the Ingresses at a front, which is the name of the Ingress that has it for itself, or names.SharedFront. The map
// belongs to the Split.
func (s *Split) Ingresses(front svc.Name) map[svc.Name]*networkingv1.Ingress {
	if front == names.SharedFront() {
		return s.shared
	}
	return s.in(front.Namespace).ingresses[front]
}

// Fronts returns the fronts that have Ingresses.
func (s *Split) Fronts() iter.Seq[svc.Name] {
	return func(yield func(svc.Name) bool) {
		if len(s.shared) > 0 && !yield(names.SharedFront()) {
			return
		}
		for _, part := range s.spaces {
			for f := range part.ingresses {
				if f != names.SharedFront() && !yield(f) {
					return
				}
			}
		}
	}
}

// Problem returns why an Ingress is at no front, "" if it is at one.
func (s *Split) Problem(n svc.Name) string { return s.in(n.Namespace).problems[n] }

// Ignored returns the annotations of an Ingress without effect at its front, "" for none.
func (s *Split) Ignored(n svc.Name) string { return s.in(n.Namespace).ignored[n] }

// At returns the fronts of an Ingress. A canary may have several.
func (s *Split) At(n svc.Name) []svc.Name { return s.in(n.Namespace).frontsOf(n) }

// Changed returns the fronts that are not as they were before, since some Ingresses have changed.
func (s *Split) Changed(before *Split, ingresses map[svc.Name]bool) map[svc.Name]bool {
	some := map[string]map[svc.Name]bool{}
	for n := range ingresses {
		if some[n.Namespace] == nil {
			some[n.Namespace] = map[svc.Name]bool{}
		}
		some[n.Namespace][n] = true
	}
	out := map[svc.Name]bool{}
	for namespace, names := range some {
		mark(out, before.in(namespace), s.in(namespace), names)
	}
	return out
}
