package apiserver_test

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	corev1apply "k8s.io/client-go/applyconfigurations/core/v1"
)

func testPodDefaults(a api) {
	p := a.pod("p", func(p *corev1.Pod) {
		c := &p.Spec.Containers[0]
		c.Ports = []corev1.ContainerPort{{ContainerPort: 80}}
		c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(80)}}}
		c.Env = []corev1.EnvVar{{Name: "IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}}}
		p.Spec.Volumes = []corev1.Volume{{Name: "v"}}
		p.Status.Phase = corev1.PodRunning // not for the creator to say
	})
	s, c := p.Spec, p.Spec.Containers[0]
	for what, ok := range map[string]bool{
		"restartPolicy": s.RestartPolicy == corev1.RestartPolicyAlways,
		"dnsPolicy":     s.DNSPolicy == corev1.DNSClusterFirst,
		"grace":         *s.TerminationGracePeriodSeconds == 30,
		"serviceLinks":  *s.EnableServiceLinks,
		"scheduler":     s.SchedulerName == "default-scheduler",
		"protocol":      c.Ports[0].Protocol == corev1.ProtocolTCP,
		"probe thresholds": c.ReadinessProbe.TimeoutSeconds == 1 && c.ReadinessProbe.PeriodSeconds == 10 &&
			c.ReadinessProbe.SuccessThreshold == 1 && c.ReadinessProbe.FailureThreshold == 3,
		"probe path":  c.ReadinessProbe.HTTPGet.Path == "/" && c.ReadinessProbe.HTTPGet.Scheme == "HTTP",
		"fieldRef":    c.Env[0].ValueFrom.FieldRef.APIVersion == "v1",
		"volume":      s.Volumes[0].EmptyDir != nil,
		"phase":       p.Status.Phase == corev1.PodPending,
		"qos":         p.Status.QOSClass == corev1.PodQOSBestEffort,
		"generation":  p.Generation == 1,
		"pull policy": c.ImagePullPolicy == corev1.PullAlways,
	} {
		if !ok {
			a.Errorf("wrong default: %s in %+v", what, p)
		}
	}
	h := a.pod("host", func(p *corev1.Pod) {
		p.Spec.HostNetwork = true
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}}
	})
	if h.Spec.Containers[0].Ports[0].HostPort != 80 {
		a.Error("a pod in the host's network must have its container port as host port")
	}
}

func testPodValidation(a api) {
	probe := func(p *corev1.Probe) func(*corev1.Pod) {
		return func(x *corev1.Pod) { x.Spec.Containers[0].ReadinessProbe = p }
	}
	container := func(f func(*corev1.Container)) func(*corev1.Pod) {
		return func(p *corev1.Pod) { f(&p.Spec.Containers[0]) }
	}
	for _, c := range []struct {
		change func(*corev1.Pod)
		fields []string
	}{
		{func(p *corev1.Pod) { p.Name = "Upper" }, []string{"metadata.name"}},
		{func(p *corev1.Pod) { p.Spec.Containers = nil }, []string{"spec.containers"}},
		{container(func(c *corev1.Container) { c.Name = "A" }), []string{"spec.containers[0].name"}},
		{container(func(c *corev1.Container) { c.Image = "" }), []string{"spec.containers[0].image"}},
		{container(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 70000}} }),
			[]string{"spec.containers[0].ports[0].containerPort"}},
		{container(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 1, Protocol: "HTTP"}} }),
			[]string{"spec.containers[0].ports[0].protocol"}},
		{container(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 1, Name: "Not_A_Port"}} }),
			[]string{"spec.containers[0].ports[0].name"}},
		{container(func(c *corev1.Container) {
			c.Ports = []corev1.ContainerPort{{ContainerPort: 1, Name: "a"}, {ContainerPort: 2, Name: "a"}}
		}), []string{"spec.containers[0].ports[1].name"}},
		{container(func(c *corev1.Container) { c.Env = []corev1.EnvVar{{Name: ""}} }), []string{"spec.containers[0].env[0].name"}},
		{container(func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "X", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.magic"}}}}
		}), []string{"spec.containers[0].env[0].valueFrom.fieldRef.fieldPath"}},
		{container(func(c *corev1.Container) { c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}} }),
			[]string{"spec.containers[0].volumeMounts[0].name"}},
		{probe(&corev1.Probe{}), []string{"spec.containers[0].readinessProbe"}},
		{probe(&corev1.Probe{PeriodSeconds: -1,
			ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromString("NO")}}}),
			[]string{"spec.containers[0].readinessProbe.periodSeconds", "spec.containers[0].readinessProbe.tcpSocket.port"}},
		{container(func(c *corev1.Container) {
			c.LivenessProbe = &corev1.Probe{SuccessThreshold: 2,
				ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
		}), []string{"spec.containers[0].livenessProbe.successThreshold"}},
		{func(p *corev1.Pod) { p.Spec.RestartPolicy = "Sometimes" }, []string{"spec.restartPolicy"}},
		{func(p *corev1.Pod) { p.Spec.DNSPolicy = corev1.DNSNone }, []string{"spec.dnsConfig"}},
		{func(p *corev1.Pod) { p.Spec.NodeName = "not a node" }, []string{"spec.nodeName"}},
		{func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"a b": "c"} }, []string{"spec.nodeSelector"}},
		{func(p *corev1.Pod) { p.Spec.HostAliases = []corev1.HostAlias{{IP: "1.2.3"}} }, []string{"spec.hostAliases[0].ip"}},
		{func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v"}, {Name: "v"}} }, []string{"spec.volumes[1].name"}},
		{func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, p.Spec.Containers[0]) }, []string{"spec.containers[1].name"}},
		{func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64(0)) }, []string{"spec.activeDeadlineSeconds"}},
	} {
		_, err := a.client.CoreV1().Pods(a.ns).Create(a.ctx, podNamed("p", c.change), metav1.CreateOptions{})
		invalidAt(a.T, err, c.fields...)
	}
}

func testPodUpdate(a api) {
	pods := a.client.CoreV1().Pods(a.ns)
	p := a.pod("p")
	for _, change := range []func(*corev1.Pod){
		func(p *corev1.Pod) { p.Spec.NodeName = "n" },
		func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"x"} },
		func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever },
	} {
		changed := p.DeepCopy()
		change(changed)
		_, err := pods.Update(a.ctx, changed, metav1.UpdateOptions{})
		invalidAt(a.T, err, "spec")
		if !strings.Contains(err.Error(), "pod updates may not change fields other than") {
			a.Errorf("unclear: %v", err)
		}
	}
	changed := p.DeepCopy()
	changed.Spec.Containers = append(changed.Spec.Containers, corev1.Container{Name: "more", Image: "host"})
	_, err := pods.Update(a.ctx, changed, metav1.UpdateOptions{})
	invalidAt(a.T, err, "spec.containers")
	p.Spec.Containers[0].Image = "other"
	p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
	p, err = pods.Update(a.ctx, p, metav1.UpdateOptions{})
	a.must(err)
	p.Spec.Tolerations = nil
	_, err = pods.Update(a.ctx, p, metav1.UpdateOptions{})
	invalidAt(a.T, err, "spec.tolerations")
}

func testPodDeletion(a api) {
	pods := a.client.CoreV1().Pods(a.ns)
	a.pod("free")
	a.must(pods.Delete(a.ctx, "free", metav1.DeleteOptions{}))
	if _, err := pods.Get(a.ctx, "free", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		a.Errorf("a pod without a node has nothing to wait for: %v", err)
	}
	a.pod("bound", onNode("n"))
	a.must(pods.Delete(a.ctx, "bound", metav1.DeleteOptions{}))
	p, err := pods.Get(a.ctx, "bound", metav1.GetOptions{})
	a.must(err)
	if p.DeletionTimestamp == nil || *p.DeletionGracePeriodSeconds != 30 {
		a.Fatalf("want a deletion with 30 s of grace, got %v %v", p.DeletionTimestamp, p.DeletionGracePeriodSeconds)
	}
	if row := a.table("/api/v1/namespaces/" + a.ns + "/pods").Rows[0]; row.Cells[2] != "Terminating" {
		a.Errorf("shown as %v", row.Cells[2])
	}
	// A shorter wish counts, then the agent's deletion with no grace ends it.
	a.must(pods.Delete(a.ctx, "bound", metav1.DeleteOptions{GracePeriodSeconds: new(int64(5))}))
	p, err = pods.Get(a.ctx, "bound", metav1.GetOptions{})
	a.must(err)
	if *p.DeletionGracePeriodSeconds != 5 {
		a.Errorf("grace %d, want 5", *p.DeletionGracePeriodSeconds)
	}
	a.must(pods.Delete(a.ctx, "bound", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	if _, err := pods.Get(a.ctx, "bound", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		a.Errorf("still there: %v", err)
	}
}

// A Pod that is deleted in the moment after its binding has its time to end,
// though the caches of the server have not seen the binding.
func testPodDeletedOnceBound(a api) {
	pods := a.client.CoreV1().Pods(a.ns)
	for i := range 150 {
		name := fmt.Sprintf("p-%d", i)
		a.pod(name)
		a.must(pods.Bind(a.ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: name},
			Target: corev1.ObjectReference{Kind: "Node", Name: "n"}}, metav1.CreateOptions{}))
		a.must(pods.Delete(a.ctx, name, metav1.DeleteOptions{}))
		p, err := pods.Get(a.ctx, name, metav1.GetOptions{})
		a.must(err)
		if p.DeletionGracePeriodSeconds == nil || *p.DeletionGracePeriodSeconds != 30 {
			a.Fatalf("pod %d: want a deletion with 30 s of grace, got %v", i, p.DeletionGracePeriodSeconds)
		}
	}
}

func testBinding(a api) {
	a.pod("p")
	bind := func(node string) error {
		return a.client.CoreV1().Pods(a.ns).Bind(a.ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "p"},
			Target: corev1.ObjectReference{Kind: "Node", Name: node}}, metav1.CreateOptions{})
	}
	a.must(bind("n1"))
	p, err := a.client.CoreV1().Pods(a.ns).Get(a.ctx, "p", metav1.GetOptions{})
	a.must(err)
	if p.Spec.NodeName != "n1" || len(p.Status.Conditions) != 1 || p.Status.Conditions[0].Type != corev1.PodScheduled {
		a.Errorf("bound pod: %+v", p)
	}
	if err := bind("n2"); !apierrors.IsConflict(err) {
		a.Errorf("second binding: got %v, want 409", err)
	}
	err = a.client.CoreV1().Pods(a.ns).Bind(a.ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "nope"},
		Target: corev1.ObjectReference{Name: "n"}}, metav1.CreateOptions{})
	if !apierrors.IsNotFound(err) {
		a.Errorf("binding of no pod: got %v, want 404", err)
	}
	a.must(a.client.CoreV1().Pods(a.ns).Delete(a.ctx, "p", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
}

// The status has its own path: each path leaves the other's part alone.
func testStatus(a api) {
	pods := a.client.CoreV1().Pods(a.ns)
	p := a.pod("p")
	change := p.DeepCopy()
	change.Status.Phase, change.Status.PodIP = corev1.PodRunning, "10.244.0.5"
	change.Spec.Containers[0].Image = "smuggled"
	p, err := pods.UpdateStatus(a.ctx, change, metav1.UpdateOptions{})
	a.must(err)
	if p.Status.Phase != corev1.PodRunning || len(p.Status.PodIPs) != 1 || p.Spec.Containers[0].Image != "host" || p.Generation != 1 {
		a.Errorf("after a status update: %+v", p)
	}
	p.Status.Phase = corev1.PodFailed
	p.Labels = map[string]string{"a": "b"}
	p, err = pods.Update(a.ctx, p, metav1.UpdateOptions{})
	a.must(err)
	if p.Status.Phase != corev1.PodRunning || p.Labels["a"] != "b" {
		a.Errorf("after an update: %+v", p)
	}
	// An applied status is not owned by who applies the object.
	applied, err := pods.Apply(a.ctx, corev1apply.Pod("p", a.ns).WithStatus(corev1apply.PodStatus().WithPhase(corev1.PodFailed)),
		metav1.ApplyOptions{FieldManager: "m"})
	a.must(err)
	for _, f := range applied.ManagedFields {
		if f.Manager == "m" && strings.Contains(string(f.FieldsV1.GetRawBytes()), "f:status") {
			a.Errorf("the applier owns the status: %s", f.FieldsV1.GetRawBytes())
		}
	}
	_, err = pods.Patch(a.ctx, "p", types.StrategicMergePatchType, []byte(`{"status":{"podIP":"not an ip"}}`), metav1.PatchOptions{}, "status")
	invalidAt(a.T, err, "status.podIPs[0]")
}

func testNamespace(a api) {
	client := a.client.CoreV1().Namespaces()
	const name = "doomed"
	ns, err := client.Create(a.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	a.must(err)
	if ns.Status.Phase != corev1.NamespaceActive || len(ns.Spec.Finalizers) != 1 || ns.Labels["kubernetes.io/metadata.name"] != name {
		a.Errorf("new namespace: %+v", ns)
	}
	a.must(client.Delete(a.ctx, name, metav1.DeleteOptions{}))
	ns, err = client.Get(a.ctx, name, metav1.GetOptions{})
	a.must(err)
	if ns.Status.Phase != corev1.NamespaceTerminating || ns.DeletionTimestamp == nil {
		a.Errorf("deleted namespace: %+v", ns)
	}
	_, err = a.client.CoreV1().ConfigMaps(name).Create(a.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "late"}},
		metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		a.Errorf("create in a terminating namespace: %v", err)
	}
	ns.Spec.Finalizers = nil
	_, err = client.Finalize(a.ctx, ns, metav1.UpdateOptions{})
	a.must(err)
	eventually(a.T, "the namespace goes", func() bool {
		_, err := client.Get(a.ctx, name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	for _, immortal := range []string{"default", "kube-system", "kube-public", "kube-node-lease"} {
		if err := client.Delete(a.ctx, immortal, metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
			a.Errorf("delete %s: got %v, want 403", immortal, err)
		}
	}
	_, err = client.Create(a.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a.b"}}, metav1.CreateOptions{})
	invalidAt(a.T, err, "metadata.name")
}

func testNode(a api) {
	nodes := a.client.CoreV1().Nodes()
	n, err := nodes.Create(a.ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"node-role.kubernetes.io/edge": ""}},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24", "fd00:10:244:1::/64"}},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue,
				LastHeartbeatTime: metav1.NewTime(time.Now())}},
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.7"}},
		},
	}, metav1.CreateOptions{})
	a.must(err)
	if n.Spec.PodCIDR != "10.244.1.0/24" {
		a.Errorf("podCIDR %q", n.Spec.PodCIDR)
	}
	row := a.table("/api/v1/nodes/n1").Rows[0].Cells
	if row[1] != "Ready" || row[2] != "edge" || row[5] != "192.0.2.7" {
		a.Errorf("row: %v", row)
	}
	change := n.DeepCopy()
	change.Spec.PodCIDRs, change.Spec.PodCIDR = []string{"10.244.2.0/24"}, "10.244.2.0/24"
	_, err = nodes.Update(a.ctx, change, metav1.UpdateOptions{})
	invalidAt(a.T, err, "spec.podCIDRs")
	_, err = nodes.Patch(a.ctx, "n1", types.MergePatchType,
		[]byte(`{"spec":{"unschedulable":true,"taints":[{"key":"k","effect":"Never"}]}}`), metav1.PatchOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "taints[0].effect") {
		a.Errorf("a taint without a known effect: %v", err)
	}
	_, err = nodes.Patch(a.ctx, "n1", types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
	a.must(err)
	l, err := nodes.List(a.ctx, metav1.ListOptions{FieldSelector: "spec.unschedulable=true"})
	a.must(err)
	if len(l.Items) != 1 {
		a.Errorf("found %d nodes", len(l.Items))
	}
	a.must(nodes.Delete(a.ctx, "n1", metav1.DeleteOptions{}))
}

func testEvents(a api) {
	old := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: "e1"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "p", Namespace: a.ns},
		Reason:         "Started", Message: "it runs", Type: corev1.EventTypeNormal, Count: 3,
		Source: corev1.EventSource{Component: "runner", Host: "n1"}, FirstTimestamp: metav1.Now(), LastTimestamp: metav1.Now(),
	}
	_, err := a.client.CoreV1().Events(a.ns).Create(a.ctx, old, metav1.CreateOptions{})
	a.must(err)
	seen, err := a.client.EventsV1().Events(a.ns).Get(a.ctx, "e1", metav1.GetOptions{})
	a.must(err)
	if seen.Note != "it runs" || seen.Regarding.Name != "p" || seen.DeprecatedCount != 3 {
		a.Errorf("core event in events.k8s.io: %+v", seen)
	}
	fresh := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "e2"}, EventTime: metav1.NowMicro(), ReportingController: "fairlead.dev/proxy",
		ReportingInstance: "n1",
		Action:            "Sync", Reason: "Fallback", Regarding: corev1.ObjectReference{Kind: "Pod", Name: "q", Namespace: a.ns},
		Note: "ipvs is missing", Type: corev1.EventTypeWarning,
	}
	_, err = a.client.EventsV1().Events(a.ns).Create(a.ctx, fresh, metav1.CreateOptions{})
	a.must(err)
	for sel, want := range map[string]string{
		"involvedObject.name=p": "e1", "reason=Fallback": "e2", "type=Warning,involvedObject.kind=Pod": "e2", "source=runner": "e1",
	} {
		l, err := a.client.CoreV1().Events(a.ns).List(a.ctx, metav1.ListOptions{FieldSelector: sel})
		a.must(err)
		if len(l.Items) != 1 || l.Items[0].Name != want {
			a.Errorf("%s found %d events, want %s", sel, len(l.Items), want)
		}
	}
	bad := fresh.DeepCopy()
	bad.Name, bad.ReportingController, bad.Action = "e3", "", ""
	_, err = a.client.EventsV1().Events(a.ns).Create(a.ctx, bad, metav1.CreateOptions{})
	invalidAt(a.T, err, "reportingController", "action")
	w, err := a.client.EventsV1().Events(a.ns).Watch(a.ctx, metav1.ListOptions{})
	a.must(err)
	defer w.Stop()
	if _, ok := (<-w.ResultChan()).Object.(*eventsv1.Event); !ok {
		a.Error("the watch of events.k8s.io shows another type")
	}
}

func testSecret(a api) {
	secrets := a.client.CoreV1().Secrets(a.ns)
	s, err := secrets.Create(a.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": "v"}},
		metav1.CreateOptions{})
	a.must(err)
	if string(s.Data["k"]) != "v" || len(s.StringData) != 0 || s.Type != corev1.SecretTypeOpaque {
		a.Errorf("got %+v", s)
	}
	s, err = secrets.Patch(a.ctx, "s", types.MergePatchType, []byte(`{"stringData":{"l":"w"}}`), metav1.PatchOptions{})
	a.must(err)
	if string(s.Data["l"]) != "w" || string(s.Data["k"]) != "v" {
		a.Errorf("after the patch: %v", s.Data)
	}
	s.Type = corev1.SecretTypeBasicAuth
	s.Data["username"] = []byte("u")
	_, err = secrets.Update(a.ctx, s, metav1.UpdateOptions{})
	invalidAt(a.T, err, "type")
	_, err = secrets.Create(a.ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "t"}, Type: corev1.SecretTypeTLS},
		metav1.CreateOptions{})
	invalidAt(a.T, err, "data[tls.crt]", "data[tls.key]")
}

func testConfigMap(a api) {
	cm := a.configMap("cm", nil)
	yes := true
	cm.Immutable = &yes
	cm, err := a.client.CoreV1().ConfigMaps(a.ns).Update(a.ctx, cm, metav1.UpdateOptions{})
	a.must(err)
	cm.Data["k"] = "other"
	_, err = a.client.CoreV1().ConfigMaps(a.ns).Update(a.ctx, cm, metav1.UpdateOptions{})
	invalidAt(a.T, err, "data")
	_, err = a.client.CoreV1().ConfigMaps(a.ns).Create(a.ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "bad"},
		Data: map[string]string{"a/b": ""}}, metav1.CreateOptions{})
	invalidAt(a.T, err, "data[a/b]")
}
