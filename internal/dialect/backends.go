package dialect

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
)

// backends returns an annotation that chooses between connections to Pods and to node ports.
func backends(key, pods, nodePorts string) Annotation {
	return Annotation{Key: key, Values: pods + " or " + nodePorts, Sets: []Field{FieldBackends}, read: func(r *reader, v string) error {
		switch strings.ToLower(v) {
		case pods:
			r.set(FieldBackends, "Pods", func(s *Spec) { s.NodePorts = false })
		case nodePorts:
			r.set(FieldBackends, "node ports", func(s *Spec) { s.NodePorts = true })
		default:
			return fmt.Errorf("%q is neither %s nor %s", shorten(v), pods, nodePorts)
		}
		return nil
	}}
}

// nodeSelector returns an annotation that selects nodes by their labels. As in the clouds, their node ports have connections
// then, unless Pods are asked for.
func nodeSelector(key, values string) Annotation {
	return Annotation{Key: key, Values: values, Sets: []Field{FieldBackendNodes}, read: func(r *reader, v string) error {
		if _, err := labels.Parse(v); err != nil || len(v) > maxSelector {
			return fmt.Errorf("%q is not a selector of labels, as: key=value or key in (a, b)", shorten(v))
		}
		r.set(FieldBackendNodes, v, func(s *Spec) { s.BackendNodes = v })
		return nil
	}}
}

const maxSelector = 10000

// finishBackends decides between Pods and node ports where no annotation does.
func (r *reader) finishBackends() {
	if _, said := r.Origins[FieldBackends]; said {
		return
	}
	if o, has := r.Origins[FieldBackendNodes]; has {
		r.Spec.NodePorts = true
		r.Origins[FieldBackends] = Origin{o.From, "node ports"}
		return
	}
	r.Origins[FieldBackends] = Origin{"default", "Pods"}
}

const ejectValues = "off, or pairs with commas between: errors=1..100 in a row, share=1..100 percent, panic=0..100 percent"

// eject returns the annotation about Pods that fail.
func eject(key string) Annotation {
	return Annotation{Key: key, Values: ejectValues, Sets: []Field{FieldEject}, read: func(r *reader, v string) error {
		e, err := parseEject(v)
		if err == nil {
			r.set(FieldEject, v, func(s *Spec) { s.Eject = e })
		}
		return err
	}}
}

// parseEject reads off, or errors=5,share=50,panic=30 with each at most once.
func parseEject(v string) (e Eject, err error) {
	if strings.EqualFold(v, "off") {
		return Eject{Off: true}, nil
	}
	seen := map[string]bool{}
	for item := range strings.SplitSeq(v, ",") {
		key, value, is := strings.Cut(item, "=")
		key = strings.ToLower(strings.TrimSpace(key))
		if !is || seen[key] {
			return Eject{}, fmt.Errorf("%q is not %s", shorten(v), ejectValues)
		}
		seen[key] = true
		to, least, unit := (*int)(nil), 1, "percent"
		switch key {
		case "errors":
			to, unit = &e.Errors, "in a row"
		case "share":
			to = &e.Share
		case "panic":
			to, least = &e.Panic, 0
		default:
			return Eject{}, fmt.Errorf("%q is not one of errors, share, panic", shorten(key))
		}
		if *to, err = parseNumber(strings.TrimSpace(value), least, 100, unit); err != nil {
			return Eject{}, fmt.Errorf("%s: %w", key, err)
		}
	}
	return e, nil
}
