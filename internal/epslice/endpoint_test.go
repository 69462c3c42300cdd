package epslice

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func TestParseIP(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "010.0.0.1": "10.0.0.1", "::ffff:10.0.0.1": "10.0.0.1", "FD00::0001": "fd00::1",
	} {
		if got, _, ok := parseIP(in); !ok || got != want {
			t.Errorf("%s: %q, %v", in, got, ok)
		}
	}
	for _, bad := range []string{"", "x", "10.0.0", "10.0.0.0/8"} {
		if got, _, ok := parseIP(bad); ok {
			t.Errorf("%q is taken for %s", bad, got)
		}
	}
}

// What a user has done wrong is said, and the others are served all the same.
func TestNotesTellWhatIsWrong(t *testing.T) {
	w := manyPods(3)
	w.service.Spec.Ports = []corev1.ServicePort{{Name: "web", Port: 80, TargetPort: intstr.FromString("htpp")}}
	w.pods["p1"].Status.PodIPs = []corev1.PodIP{{IP: "10.0.0"}}
	plan := Slices(w.input(0))
	var text []string
	for _, n := range plan.Events {
		text = append(text, n.Reason+": "+n.Message)
	}
	all := strings.Join(text, "\n")
	for _, want := range []string{"TargetPortNotFound: 3 of 3", `"htpp"`, "InvalidPodIP", `p1 ("10.0.0")`} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is not in:\n%s", want, all)
		}
	}
	if len(plan.Create) != 1 || len(plan.Create[0].Endpoints) != 2 {
		t.Errorf("%d slices", len(plan.Create))
	}
}

// A create whose answer was lost is tried again under the same name; a name in
// use by something else is passed over.
func TestNamesFollowFromTheService(t *testing.T) {
	w := manyPods(1)
	first := Slices(w.input(0)).Create[0]
	if again := Slices(w.input(0)).Create[0]; again.Name != first.Name || first.GenerateName != "web-" ||
		!strings.HasPrefix(first.Name, "web-") {
		t.Errorf("names %q and %q", first.Name, again.Name)
	}
	in := w.input(0)
	in.TakenNames = []string{first.Name}
	if other := Slices(in).Create[0]; other.Name == first.Name {
		t.Error("a taken name is given")
	}
	w.service.UID = "svc-2"
	if other := Slices(w.input(0)).Create[0]; other.Name == first.Name {
		t.Error("a new Service of the same name uses the names of the old one")
	}
}

// Slices of an earlier Service of the same name are not taken over.
func TestSlicesOfAnotherOwnerAreDeleted(t *testing.T) {
	w := manyPods(2)
	w.apply(t, Slices(w.input(0)))
	w.service = w.service.DeepCopy()
	w.service.UID = "svc-2"
	plan := Slices(w.input(0))
	if len(plan.Create) != 1 || len(plan.Update) != 0 || len(plan.Delete) != 1 {
		t.Errorf("%d creates, %d updates, %d deletes", len(plan.Create), len(plan.Update), len(plan.Delete))
	}
	w.service.DeletionTimestamp = &metav1.Time{Time: w.clock}
	if plan := Slices(w.input(0)); len(plan.Create) != 0 {
		t.Error("a Service being deleted gets a new slice")
	}
}

// Services of servers that do not default ipFamilies.
func TestAddressTypes(t *testing.T) {
	for _, c := range []struct {
		ip   string
		want int
	}{{"10.96.0.1", 1}, {"fd00::1", 1}, {corev1.ClusterIPNone, 2}, {"", 2}} {
		s := &corev1.Service{}
		s.Spec.ClusterIP = c.ip
		if got := addressTypes(s); len(got) != c.want || c.ip == "fd00::1" && got[0] != discoveryv1.AddressTypeIPv6 {
			t.Errorf("%q: %v", c.ip, got)
		}
	}
}
