package placement

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

func node(name, zone string, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		corev1.LabelTopologyZone: zone, corev1.LabelHostname: name,
	}}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	for _, f := range change {
		f(n)
	}
	return n
}

// pod makes a Pod with labels "app=NAME" and a spec in YAML.
func pod(t *testing.T, app, spec string) *corev1.Pod {
	t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Labels: map[string]string{"app": app}}}
	if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
		t.Fatal(err)
	}
	return p
}

// build places Pods "app@node" on three nodes in two zones.
func build(t *testing.T, on string, nodes ...*corev1.Node) *Cluster {
	t.Helper()
	c := NewCluster(func(name string) labels.Set { return labels.Set{"name": name} })
	if nodes == nil {
		nodes = []*corev1.Node{node("a1", "a"), node("a2", "a"), node("b1", "b")}
	}
	for _, n := range nodes {
		c.SetNode(n)
	}
	for i, at := range strings.Fields(on) {
		app, where, _ := strings.Cut(at, "@")
		c.Put(fmt.Sprint(i), pod(t, app, "{}"), where)
	}
	return c
}

// ask returns the node, or the reasons in brackets.
func ask(c *Cluster, p *corev1.Pod) string {
	name, reasons := c.Choose(p, func(string) bool { return true })
	if name == "" {
		return fmt.Sprint(reasons)
	}
	return name
}

// Rules of https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/ and
// .../topology-spread-constraints/.
func TestChoose(t *testing.T) {
	const (
		term    = `{labelSelector: {matchLabels: {app: cache}}, topologyKey: topology.kubernetes.io/zone}`
		self    = `{labelSelector: {matchLabels: {app: web}}, topologyKey: kubernetes.io/hostname}`
		spread  = `labelSelector: {matchLabels: {app: web}}, maxSkew: 1`
		byZone  = spread + `, topologyKey: topology.kubernetes.io/zone`
		require = `requiredDuringSchedulingIgnoredDuringExecution: `
		prefer  = `preferredDuringSchedulingIgnoredDuringExecution: `
	)
	for _, c := range []struct{ name, on, spec, want string }{
		{"the first by name", "", `{}`, "a1"},
		{"fewest Pods", "x@a1 x@b1", `{}`, "a2"},
		{"its own are spread first", "web@a1 x@a2 x@a2 x@b1 x@b1 x@b1", `{}`, "b1"},
		{"over zones, too", "web@a1", `{}`, "b1"},
		{"node selector", "", `{nodeSelector: {kubernetes.io/hostname: b1}}`, "b1"},
		{"required node affinity", "", `{affinity: {nodeAffinity: {` + require + `{nodeSelectorTerms: [
			{matchExpressions: [{key: topology.kubernetes.io/zone, operator: In, values: [b]}]}]}}}}`, "b1"},
		{"by name", "", `{affinity: {nodeAffinity: {` + require + `{nodeSelectorTerms: [
			{matchFields: [{key: metadata.name, operator: In, values: [a2]}]}]}}}}`, "a2"},
		{"NotIn", "", `{affinity: {nodeAffinity: {` + require + `{nodeSelectorTerms: [
			{matchExpressions: [{key: kubernetes.io/hostname, operator: NotIn, values: [a1]}]}]}}}}`, "a2"},
		{"preferred node affinity", "", `{affinity: {nodeAffinity: {` + prefer + `[
			{weight: 5, preference: {matchExpressions: [{key: topology.kubernetes.io/zone, operator: In, values: [b]}]}}]}}}`, "b1"},
		{"no node", "", `{nodeSelector: {gpu: yes}}`, "map[" + ReasonAffinity + ":3]"},

		{"beside a cache", "cache@b1", `{affinity: {podAffinity: {` + require + `[` + term + `]}}}`, "b1"},
		{"no cache", "", `{affinity: {podAffinity: {` + require + `[` + term + `]}}}`, "map[" + reasonPodAffinity + ":3]"},
		{"the first of its own", "", `{affinity: {podAffinity: {` + require + `[` + self + `]}}}`, "a1"},
		{"away from caches", "cache@a1", `{affinity: {podAntiAffinity: {` + require + `[` + term + `]}}}`, "b1"},
		{"one on a node", "web@a1 web@b1", `{affinity: {podAntiAffinity: {` + require + `[` + self + `]}}}`, "a2"},
		{"one on a node, full", "web@a1 web@a2 web@b1", `{affinity: {podAntiAffinity: {` + require + `[` + self + `]}}}`,
			"map[" + reasonAntiAffinity + ":3]"},
		{"another namespace", "cache@b1", `{affinity: {podAffinity: {` + require + `[
			{labelSelector: {matchLabels: {app: cache}}, namespaces: [else], topologyKey: topology.kubernetes.io/zone}]}}}`,
			"map[" + reasonPodAffinity + ":3]"},
		{"namespaces by their labels", "cache@b1", `{affinity: {podAffinity: {` + require + `[
			{labelSelector: {matchLabels: {app: cache}}, namespaceSelector: {matchLabels: {name: shop}},
			topologyKey: topology.kubernetes.io/zone}]}}}`, "b1"},
		{"rather near", "cache@b1 x@b1", `{affinity: {podAffinity: {` + prefer + `[{weight: 1, podAffinityTerm: ` + term + `}]}}}`, "b1"},
		{"rather far", "cache@a1", `{affinity: {podAntiAffinity: {` + prefer + `[{weight: 1, podAffinityTerm: ` + term + `}]}}}`, "b1"},

		{"even zones", "web@a1", `{topologySpreadConstraints: [{` + byZone + `, whenUnsatisfiable: DoNotSchedule}]}`, "b1"},
		{"two in b", "web@b1 web@b1 web@a1", `{topologySpreadConstraints: [{` + byZone + `, whenUnsatisfiable: DoNotSchedule}]}`, "a2"},
		{"skew with a selector", "web@a1", `{nodeSelector: {topology.kubernetes.io/zone: a},
			topologySpreadConstraints: [{` + byZone + `, whenUnsatisfiable: DoNotSchedule}]}`, "a2"},
		{"skew with all nodes", "web@a1", `{nodeSelector: {topology.kubernetes.io/zone: a}, topologySpreadConstraints: [
			{` + byZone + `, whenUnsatisfiable: DoNotSchedule, nodeAffinityPolicy: Ignore}]}`,
			"map[" + ReasonAffinity + ":1 " + reasonSpread + ":2]"},
		{"too few zones", "web@a1 web@b1", `{topologySpreadConstraints: [{` + byZone + `, minDomains: 3, whenUnsatisfiable: DoNotSchedule}]}`,
			"map[" + reasonSpread + ":3]"},
		{"no such label", "", `{topologySpreadConstraints: [{` + spread + `, topologyKey: rack, whenUnsatisfiable: DoNotSchedule}]}`,
			"map[" + reasonSpreadLabel + ":3]"},
		{"evenly if it can be", "web@a1 web@a2 x@b1 x@b1 x@b1",
			`{topologySpreadConstraints: [{` + byZone + `, whenUnsatisfiable: ScheduleAnyway}]}`, "b1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := ask(build(t, c.on), pod(t, "web", c.spec)); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// What is placed already keeps others away by its own rule.
func TestExistingAntiAffinity(t *testing.T) {
	c := build(t, "")
	c.Put("cache", pod(t, "cache", `{affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [
		{labelSelector: {matchLabels: {app: web}}, topologyKey: topology.kubernetes.io/zone}]}}}`), "a1")
	if got := ask(c, pod(t, "web", `{}`)); got != "b1" {
		t.Errorf("to %s", got)
	}
	c.DeleteNode("b1")
	if got, want := ask(c, pod(t, "web", `{}`)), "map["+reasonRepelled+":2]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	c.Remove("cache")
	if got := ask(c, pod(t, "web", `{}`)); got != "a1" {
		t.Errorf("to %s after its end", got)
	}
}

func TestRoom(t *testing.T) {
	has := func(pods, cpu, memory string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.Allocatable = corev1.ResourceList{
				"pods": resource.MustParse(pods), "cpu": resource.MustParse(cpu), "memory": resource.MustParse(memory),
			}
		}
	}
	wants := func(cpu, memory string) *corev1.Pod {
		return pod(t, "web", `{containers: [{name: c, resources: {requests: {cpu: `+cpu+`, memory: `+memory+`}}}]}`)
	}
	c := build(t, "", node("one", "a", has("2", "1", "1Gi")))
	for _, p := range []struct {
		pod  *corev1.Pod
		want string
	}{
		{wants("1100m", "1Mi"), "map[Insufficient cpu:1]"},
		{wants("1", "2Gi"), "map[Insufficient memory:1]"},
		{wants("600m", "512Mi"), "one"},
	} {
		if got := ask(c, p.pod); got != p.want {
			t.Errorf("%s, want %s", got, p.want)
		}
	}
	c.Put("1", wants("600m", "512Mi"), "one")
	if got := ask(c, wants("500m", "1Mi")); got != "map[Insufficient cpu:1]" {
		t.Errorf("beside the first: %s", got)
	}
	c.Put("2", wants("400m", "0"), "one")
	if got := ask(c, pod(t, "web", `{}`)); got != "map[Too many pods:1]" {
		t.Errorf("a third: %s", got)
	}
	c.Remove("1")
	c.Remove("2")
	if got := ask(c, wants("1", "1Gi")); got != "one" || len(c.used)+len(c.groups)+len(c.on) > 0 {
		t.Errorf("when all are gone: %s, %v", got, c.used)
	}
}

func TestMisfit(t *testing.T) {
	taint := func(key string, effect corev1.TaintEffect) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: key, Value: "v", Effect: effect}} }
	}
	cordoned := func(n *corev1.Node) { n.Spec.Unschedulable = true }
	unready := func(n *corev1.Node) { n.Status.Conditions = nil }
	for _, c := range []struct {
		change     func(*corev1.Node)
		spec, want string
	}{
		{unready, `{}`, ReasonNotReady},
		{unready, `{tolerations: [{operator: Exists}]}`, ""},
		{cordoned, `{}`, ReasonUnschedulable},
		{cordoned, `{tolerations: [{key: node.kubernetes.io/unschedulable, operator: Exists}]}`, ""},
		{taint("k", corev1.TaintEffectNoSchedule), `{}`, "node(s) had untolerated taint {k: v}"},
		{taint("k", corev1.TaintEffectPreferNoSchedule), `{}`, ""},
		{taint("k", corev1.TaintEffectNoExecute), `{tolerations: [{key: k, value: v}]}`, ""},
		{taint("k", corev1.TaintEffectNoExecute), `{tolerations: [{key: k, value: other}]}`, "node(s) had untolerated taint {k: v}"},
	} {
		p := pod(t, "web", c.spec)
		if got := misfit(p, RequirementOf(&p.Spec), node("n", "z", c.change)); got != c.want {
			t.Errorf("%s: %q, want %q", c.spec, got, c.want)
		}
	}
}

const nodeNamed = `{affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
	{matchFields: [{key: metadata.name, operator: In, values: [%s]}]}]}}}}`

// A Pod of a DaemonSet costs the same among many nodes as among few, and the affinity of others
// is compiled once.
func TestCostOfNodeAffinity(t *testing.T) {
	var nodes []*corev1.Node
	for i := range 500 {
		nodes = append(nodes, node(fmt.Sprint("n", i), "a"))
	}
	c := build(t, "", nodes...)
	if got := ask(c, pod(t, "web", fmt.Sprintf(nodeNamed, "n77"))); got != "n77" {
		t.Errorf("to %s", got)
	}
	if got, want := ask(c, pod(t, "web", fmt.Sprintf(nodeNamed, "gone"))), fmt.Sprintf("map[%s:500]", ReasonAffinity); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	cost := func(spec string) float64 {
		p := pod(t, "web", spec)
		return testing.AllocsPerRun(5, func() { ask(c, p) })
	}
	if n := cost(fmt.Sprintf(nodeNamed, "n77")); n > 100 {
		t.Errorf("%g allocations for the one node", n)
	}
	selector := `{affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
		{matchExpressions: [{key: topology.kubernetes.io/zone, operator: In, values: [a, b, c, d]}]}]}}}}`
	if n := cost(selector); n > 500*8 {
		t.Errorf("%g allocations for 500 nodes", n)
	}
}

func TestMayTake(t *testing.T) {
	c := build(t, "", node("one", "a", func(n *corev1.Node) {
		n.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("1")}
	}))
	wants := func(cpu string) *corev1.Pod {
		return pod(t, "web", `{containers: [{name: c, resources: {requests: {cpu: `+cpu+`}}}]}`)
	}
	yes, no := func(string) bool { return true }, func(string) bool { return false }
	for _, p := range []struct {
		pod  *corev1.Pod
		node string
		free func(string) bool
		want bool
	}{
		{wants("1"), "one", yes, true}, {wants("2"), "one", yes, false}, {wants("1"), "one", no, false}, {wants("1"), "gone", yes, false},
		{pod(t, "web", `{nodeSelector: {disk: ssd}}`), "one", yes, false},
	} {
		if got := c.MayTake(p.pod, p.node, p.free); got != p.want {
			t.Errorf("%v on %s: %v", p.pod.Spec, p.node, got)
		}
	}
}
