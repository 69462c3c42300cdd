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
