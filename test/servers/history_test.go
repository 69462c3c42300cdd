package servers

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
)

// Where the store keeps what is checked.
const (
	servicePrefix = "/registry/services/"
	addressPrefix = "/registry/networking.k8s.io/ipaddresses/"
	portPrefix    = "/registry/coordination.k8s.io/nodeports/"
)

// history replays all writes of one etcd in its order. Its rules hold after
// every single write, whoever made it and whatever its client was told.
type history struct {
	// held says which Service has an address or node port, uses what each has.
	held map[string]string
	uses map[string][]string
	// claims says which Service an address or node port is claimed for.
	claims map[string]string
	// stored are the Services that ever were, with what they used last.
	stored map[string][]string

	writes, services int
	broken           []string
}

func newHistory() *history {
	return &history{held: map[string]string{}, uses: map[string][]string{}, claims: map[string]string{}, stored: map[string][]string{}}
}

// add replays one write; value is nil for a deletion.
func (h *history) add(at int64, key string, value []byte) error {
	h.writes++
	deleted := value == nil
	if name, ok := strings.CutPrefix(key, servicePrefix); ok {
		if deleted {
			h.let(name)
			return nil
		}
		s := &corev1.Service{}
		if _, _, err := scheme.Codecs.UniversalDeserializer().Decode(value, nil, s); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		h.put(at, name, used(s))
		return nil
	}
	if what, ok := strings.CutPrefix(key, addressPrefix); ok {
		a := &networkingv1.IPAddress{}
		if !deleted {
			if _, _, err := scheme.Codecs.UniversalDeserializer().Decode(value, nil, a); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
		h.claim(what, deleted, func() string { return a.Spec.ParentRef.Namespace + "/" + a.Spec.ParentRef.Name })
		return nil
	}
	what, ok := strings.CutPrefix(key, portPrefix)
	if !ok {
		return nil
	}
	l := &coordinationv1.Lease{}
	if !deleted {
		if _, _, err := scheme.Codecs.UniversalDeserializer().Decode(value, nil, l); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	h.claim(what, deleted, func() string { return *l.Spec.HolderIdentity })
	return nil
}

// used are the addresses and node ports of a Service.
func used(s *corev1.Service) []string {
	ports := map[string]bool{}
	for _, p := range s.Spec.Ports {
		if p.NodePort != 0 {
			ports[strconv.Itoa(int(p.NodePort))] = true
		}
	}
	if s.Spec.HealthCheckNodePort != 0 {
		ports[strconv.Itoa(int(s.Spec.HealthCheckNodePort))] = true
	}
	out := slices.Collect(maps.Keys(ports))
	for _, ip := range s.Spec.ClusterIPs {
		if ip != corev1.ClusterIPNone && ip != "" {
			out = append(out, ip)
		}
	}
	slices.Sort(out)
	return out
}

func (h *history) put(at int64, name string, uses []string) {
	if _, ok := h.stored[name]; !ok {
		h.services++
	}
	h.let(name)
	h.stored[name] = uses
	h.uses[name] = uses
	for _, what := range uses {
		if other, ok := h.held[what]; ok {
			h.broken = append(h.broken, fmt.Sprintf("revision %d: %s is given to %s while %s has it", at, what, name, other))
		}
		if owner, ok := h.claims[what]; !ok || owner != name {
			h.broken = append(h.broken, fmt.Sprintf("revision %d: %s has %s, which is claimed for %q", at, name, what, owner))
		}
		h.held[what] = name
	}
}

// let ends what a Service has.
func (h *history) let(name string) {
	for _, what := range h.uses[name] {
		if h.held[what] == name {
			delete(h.held, what)
		}
	}
	delete(h.uses, name)
}

func (h *history) claim(what string, deleted bool, owner func() string) {
	if deleted {
		delete(h.claims, what)
		return
	}
	h.claims[what] = owner()
}

// The checker is worth nothing if it does not see what it looks for.
func TestHistoryFinds(t *testing.T) {
	service := func(name, ip string, port int32) runtime.Object {
		return &corev1.Service{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.ServiceSpec{ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{NodePort: port}}},
		}
	}
	address := func(owner string) runtime.Object {
		return &networkingv1.IPAddress{
			TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "IPAddress"},
			Spec:     networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Namespace: "default", Name: owner}},
		}
	}
	port := func(owner string) runtime.Object {
		return &coordinationv1.Lease{
			TypeMeta: metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
			Spec:     coordinationv1.LeaseSpec{HolderIdentity: new("default/" + owner)},
		}
	}
	type write struct {
		key string
		obj runtime.Object // nil deletes
	}
	a, b := servicePrefix+"default/a", servicePrefix+"default/b"
	ip, p := addressPrefix+"10.0.0.1", portPrefix+"30000"
	for name, c := range map[string]struct {
		writes []write
		want   []string
	}{
		"one after the other": {[]write{
			{ip, address("a")}, {a, service("a", "10.0.0.1", 0)}, {a, nil}, {ip, nil}, {ip, address("b")}, {b, service("b", "10.0.0.1", 0)},
		}, nil},
		"an address twice": {[]write{
			{ip, address("a")}, {a, service("a", "10.0.0.1", 0)}, {ip, nil}, {ip, address("b")}, {b, service("b", "10.0.0.1", 0)}, {a, nil},
		}, []string{"10.0.0.1 is given to default/b while default/a has it"}},
		"a port twice": {[]write{
			{p, port("a")}, {a, service("a", "None", 30000)}, {p, nil}, {p, port("b")}, {b, service("b", "None", 30000)},
		}, []string{"30000 is given to default/b while default/a has it"}},
		"without a claim": {[]write{{a, service("a", "10.0.0.1", 0)}}, []string{`10.0.0.1, which is claimed for ""`}},
		"the claim of another": {[]write{{ip, address("b")}, {a, service("a", "10.0.0.1", 0)}},
			[]string{`10.0.0.1, which is claimed for "default/b"`}},
		"an update that lets go": {[]write{
			{ip, address("a")}, {a, service("a", "10.0.0.1", 0)}, {a, service("a", "None", 0)},
			{ip, nil}, {ip, address("b")}, {b, service("b", "10.0.0.1", 0)},
		}, nil},
	} {
		h := newHistory()
		for i, w := range c.writes {
			var value []byte
			if w.obj != nil {
				var err error
				if value, err = json.Marshal(w.obj); err != nil {
					t.Fatal(err)
				}
			}
			if err := h.add(int64(i), w.key, value); err != nil {
				t.Fatal(err)
			}
		}
		if len(h.broken) != len(c.want) || len(c.want) == 1 && !strings.Contains(h.broken[0], c.want[0]) {
			t.Errorf("%s: found %q, want %q", name, h.broken, c.want)
		}
	}
}
