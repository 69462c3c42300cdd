package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/svc"
)

// A node writes its own Node, Lease and the its own status Pods, and reads
// of Secrets and ConfigMaps only what its Pods refer to.
func testNodeOwns(t *testing.T, s *apiserver.Server, admin *kubernetes.Clientset) {
	for _, n := range []string{"mine", "theirs"} {
		if _, err := admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: n},
			Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"secret", "config"} {
			name := kind + "-" + n
			var err error
			if kind == "secret" {
				_, err = admin.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}},
					metav1.CreateOptions{})
			} else {
				_, err = admin.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}},
					metav1.CreateOptions{})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		p := podNamed("pod-" + n)
		p.Spec.NodeName = n
		p.Spec.Volumes = append(p.Spec.Volumes,
			corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "secret-" + n}}})
		p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "config-" + n},
		}}}
		if _, err := admin.CoreV1().Pods("default").Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	c := kubernetes.NewForConfigOrDie(joined(t, s, "mine", t.TempDir()).Config())
	get, update, del := metav1.GetOptions{}, metav1.UpdateOptions{}, metav1.DeleteOptions{}
	type request struct {
		what    string
		allowed bool
		do      func(ctx context.Context) error
	}
	var requests []request
	for _, n := range []string{"mine", "theirs"} {
		own := n == "mine"
		requests = append(requests,
			request{"write the status of Node " + n, own, func(ctx context.Context) error {
				node, err := c.CoreV1().Nodes().Get(ctx, n, get)
				if err != nil {
					return err
				}
				_, err = c.CoreV1().Nodes().UpdateStatus(ctx, node, update)
				return err
			}},
			request{"annotate Node " + n, own, func(ctx context.Context) error {
				_, err := c.CoreV1().Nodes().Patch(ctx, n, types.MergePatchType, []byte(`{"metadata":{"annotations":{"a":"b"}}}`),
					metav1.PatchOptions{})
				return err
			}},
			request{"make the Lease of " + n, own, func(ctx context.Context) error {
				_, err := c.CoordinationV1().Leases("kube-node-lease").Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: n}},
					metav1.CreateOptions{})
				return err
			}},
			request{"get the Lease of " + n, own, func(ctx context.Context) error {
				_, err := c.CoordinationV1().Leases("kube-node-lease").Get(ctx, n, get)
				return err
			}},
			request{"get the Secret of a Pod on " + n, own, func(ctx context.Context) error {
				_, err := c.CoreV1().Secrets("default").Get(ctx, "secret-"+n, get)
				return err
			}},
			request{"watch the Secret of a Pod on " + n, own, func(ctx context.Context) error {
				w, err := c.CoreV1().Secrets("default").Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=secret-" + n})
				if err == nil {
					w.Stop()
				}
				return err
			}},
			request{"list the ConfigMap of a Pod on " + n, own, func(ctx context.Context) error {
				_, err := c.CoreV1().ConfigMaps("default").List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=config-" + n})
				return err
			}},
			request{"list the Secret of a Pod on " + n + " everywhere", false, func(ctx context.Context) error {
				_, err := c.CoreV1().Secrets("").List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=secret-" + n})
				return err
			}},
			request{"get the ConfigMap of a Pod on " + n, own, func(ctx context.Context) error {
				_, err := c.CoreV1().ConfigMaps("default").Get(ctx, "config-"+n, get)
				return err
			}},
			request{"get a Pod on " + n, own, func(ctx context.Context) error {
				_, err := c.CoreV1().Pods("default").Get(ctx, "pod-"+n, get)
				return err
			}},
			request{"list the Pods on " + n, own, func(ctx context.Context) error {
				_, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n})
				return err
			}},
			request{"write the status of a Pod on " + n, own, func(ctx context.Context) error {
				_, err := c.CoreV1().Pods("default").Patch(ctx, "pod-"+n, types.MergePatchType, []byte(`{"status":{"phase":"Running"}}`),
					metav1.PatchOptions{}, "status")
				return err
			}},
			request{"list the DNS server of " + n, own, func(ctx context.Context) error {
				_, err := c.DiscoveryV1().EndpointSlices("kube-system").Create(ctx, ownedSlice(ctx, c, n), metav1.CreateOptions{})
				return err
			}},
			request{"delete a Pod on " + n, own, func(ctx context.Context) error { return c.CoreV1().Pods("default").Delete(ctx, "pod-"+n, del) }},
		)
	}
	requests = append(requests,
		request{"list all Pods", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
			return err
		}},
		request{"take a label that Pods are kept away by", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType,
				[]byte(`{"metadata":{"labels":{"x.node-restriction.kubernetes.io/a":"b"}}}`), metav1.PatchOptions{})
			return err
		}},
		request{"take a role", false, labelMine(c, "node-role.kubernetes.io/control-plane")},
		request{"take another reserved label", false, labelMine(c, "example.kubernetes.io/a")},
		request{"confirm addresses of its own", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType,
				[]byte(`{"metadata":{"annotations":{"fairlead.dev/node-addresses":"198.51.100.1"}}}`), metav1.PatchOptions{})
			return err
		}},
		request{"confirm addresses with its status", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType,
				[]byte(`{"metadata":{"annotations":{"fairlead.dev/node-addresses":"198.51.100.1"}}}`), metav1.PatchOptions{}, "status")
			return err
		}},
		request{"take a label of fairlead", false, labelMine(c, "fairlead.dev/dns-server")},
		request{"name its zone", true, labelMine(c, "topology.kubernetes.io/zone")},
		request{"take a label for nodes", true, labelMine(c, "node.kubernetes.io/a")},
		request{"take a label of somebody", true, labelMine(c, "example.com/a")},
		request{"drop its taints", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType,
				[]byte(`{"spec":{"taints":[{"key":"a","effect":"NoSchedule"}]}}`), metav1.PatchOptions{})
			return err
		}},
		request{"take a range for its Pods", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType,
				[]byte(`{"spec":{"podCIDR":"0.0.0.0/0","podCIDRs":["0.0.0.0/0"]}}`), metav1.PatchOptions{})
			return err
		}},
		request{"take a range by the old field", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType, []byte(`{"spec":{"podCIDR":"10.244.7.0/24"}}`),
				metav1.PatchOptions{})
			return err
		}},
		request{"register with a range for its Pods", false, func(ctx context.Context) error {
			c := kubernetes.NewForConfigOrDie(joined(t, s, "greedy", t.TempDir()).Config())
			_, err := c.CoreV1().Nodes().Create(ctx, &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: "greedy"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.7.0/24"}},
			}, metav1.CreateOptions{})
			return err
		}},
		request{"bring a range with its status, which is dropped", true, func(ctx context.Context) error {
			node, err := c.CoreV1().Nodes().Get(ctx, "mine", get)
			if err != nil {
				return err
			}
			node.Spec.PodCIDR, node.Spec.PodCIDRs = "10.244.7.0/24", []string{"10.244.7.0/24"}
			if node, err = c.CoreV1().Nodes().UpdateStatus(ctx, node, update); err == nil && len(node.Spec.PodCIDRs) > 0 {
				return fmt.Errorf("the Node has the ranges %v", node.Spec.PodCIDRs)
			}
			return err
		}},
		request{"delete its Node", false, func(ctx context.Context) error { return c.CoreV1().Nodes().Delete(ctx, "mine", del) }},
		request{"list an EndpointSlice of another Service", false, func(ctx context.Context) error {
			e := ownedSlice(ctx, c, "mine")
			e.Name, e.Labels[discoveryv1.LabelServiceName] = "x", "other"
			_, err := c.DiscoveryV1().EndpointSlices("kube-system").Create(ctx, e, metav1.CreateOptions{})
			return err
		}},
		request{"list an address that is not its own", false, func(ctx context.Context) error { return listDNS(ctx, c, "", "192.0.2.2") }},
		request{"list an address of its own", true, func(ctx context.Context) error { return listDNS(ctx, c, "", "192.0.2.1") }},
		request{"list its DNS server without an owner", false, func(ctx context.Context) error {
			return updateDNS(ctx, c, func(e *discoveryv1.EndpointSlice) { e.OwnerReferences = nil })
		}},
		request{"list its DNS server under an owner with another UID", false, func(ctx context.Context) error {
			return updateDNS(ctx, c, func(e *discoveryv1.EndpointSlice) { e.OwnerReferences[0].UID = "other" })
		}},
		request{"list its DNS server without its label", false, func(ctx context.Context) error {
			return updateDNS(ctx, c, func(e *discoveryv1.EndpointSlice) { delete(e.Labels, svc.NodeLabel) })
		}},
		request{"keep its DNS server from being deleted", false, func(ctx context.Context) error {
			return updateDNS(ctx, c, func(e *discoveryv1.EndpointSlice) { e.Finalizers = []string{"example.com/stay"} })
		}},
		request{"keep its Node from being deleted", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType,
				[]byte(`{"metadata":{"finalizers":["example.com/stay"]}}`), metav1.PatchOptions{})
			return err
		}},
		request{"keep its Lease from being deleted", false, func(ctx context.Context) error {
			_, err := c.CoordinationV1().Leases("kube-node-lease").Patch(ctx, "mine", types.MergePatchType,
				[]byte(`{"metadata":{"finalizers":["example.com/stay"]}}`), metav1.PatchOptions{})
			return err
		}},
		request{"list several endpoints", false, func(ctx context.Context) error { return listDNS(ctx, c, "", "192.0.2.1", "192.0.2.1") }},
		request{"have more slices", false, func(ctx context.Context) error { return listDNS(ctx, c, "kube-dns-mine-2", "192.0.2.1") }},
		request{"say that another DNS server has ended", true, func(ctx context.Context) error { return markEnded(ctx, admin, c, "") }},
		request{"move another DNS server", false, func(ctx context.Context) error { return markEnded(ctx, admin, c, "192.0.2.99") }},
	)
	balancers(t, admin)
	for name, allowed := range map[string]bool{
		"lb-served": true, "lb-unserved": false, "lb-direct": false, "lb-cluster": false, "lb-foreign": false, "lb-unnamed": false,
		"lb-logs": true, "lb-nologs": false,
	} {
		requests = append(requests, request{"get the TLS Secret " + name, allowed, func(ctx context.Context) error {
			_, err := c.CoreV1().Secrets("default").Get(ctx, name, get)
			return err
		}})
	}
	requests = append(requests,
		request{"watch the TLS Secret of a load balancer", true, func(ctx context.Context) error {
			w, err := c.CoreV1().Secrets("default").Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=lb-served"})
			if err == nil {
				w.Stop()
			}
			return err
		}},
		request{"get the Secret of that name of another namespace", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Secrets("kube-public").Get(ctx, "lb-served", get)
			return err
		}},
		request{"get the ConfigMap of that name", false, func(ctx context.Context) error {
			_, err := c.CoreV1().ConfigMaps("default").Get(ctx, "lb-served", get)
			return err
		}},
		request{"get the Secret by which a load balancer verifies Pods", true, func(ctx context.Context) error {
			_, err := c.CoreV1().Secrets("default").Get(ctx, "lb-authority", get)
			return err
		}},
		request{"get the ConfigMap by which a load balancer verifies Pods", true, func(ctx context.Context) error {
			_, err := c.CoreV1().ConfigMaps("default").Get(ctx, "lb-authority", get)
			return err
		}},
		request{"get the ConfigMap of that name of another namespace", false, func(ctx context.Context) error {
			_, err := c.CoreV1().ConfigMaps("kube-public").Get(ctx, "lb-authority", get)
			return err
		}},
		request{"list all Secrets", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Secrets("default").List(ctx, metav1.ListOptions{})
			return err
		}},
		request{"change the TLS Secret of a load balancer", false, func(ctx context.Context) error {
			_, err := c.CoreV1().Secrets("default").Patch(ctx, "lb-served", types.MergePatchType, []byte(`{"data":{"a":"Yg=="}}`),
				metav1.PatchOptions{})
			return err
		}},
	)
	for what, change := range mirrorChanges() {
		requests = append(requests, request{"show a static Pod" + what, what == "" || what == ", privileged", func(ctx context.Context) error {
			p, err := mirrorOf(ctx, admin, "mine")
			if err != nil {
				return err
			}
			change(p)
			_, err = c.CoreV1().Pods("default").Create(ctx, p, metav1.CreateOptions{})
			return err
		}})
	}
	for _, r := range requests {
		err := r.do(t.Context())
		if err != nil && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", r.what, err)
		}
		if got := err == nil; got != r.allowed {
			t.Errorf("%s: allowed %v, want %v (%v)", r.what, got, r.allowed, err)
		}
	}
}

// mirrorOf is a Pod as a node creates it to show a static one.
func mirrorOf(ctx context.Context, admin *kubernetes.Clientset, node string) (*corev1.Pod, error) {
	n, err := admin.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	p := podNamed("")
	p.GenerateName, p.Annotations = "static-", map[string]string{corev1.MirrorPodAnnotationKey: "hash"}
	p.Spec.NodeName, p.Spec.ServiceAccountName, p.Spec.DeprecatedServiceAccount = node, "", ""
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node, UID: n.UID, Controller: new(true)}}
	return p, nil
}

// mirrorChanges make of such a Pod one that a node may not create, but for the first two.
func mirrorChanges() map[string]func(*corev1.Pod) {
	volume := func(v corev1.VolumeSource) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: v}} }
	}
	reference := corev1.LocalObjectReference{Name: "secret-theirs"}
	return map[string]func(*corev1.Pod){
		"":                      func(*corev1.Pod) {},
		", privileged":          func(p *corev1.Pod) { p.Spec.HostNetwork = true },
		" with labels":          func(p *corev1.Pod) { p.Labels = map[string]string{"app": "x"} },
		" that is none":         func(p *corev1.Pod) { p.Annotations = nil },
		" on another node":      func(p *corev1.Pod) { p.Spec.NodeName = "theirs" },
		" on no node":           func(p *corev1.Pod) { p.Spec.NodeName = "" },
		" without an owner":     func(p *corev1.Pod) { p.OwnerReferences = nil },
		" of another Node":      func(p *corev1.Pod) { p.OwnerReferences[0].Name = "theirs" },
		" of an earlier Node":   func(p *corev1.Pod) { p.OwnerReferences[0].UID = "x" },
		" that it does not own": func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil },
		" that keeps its Node":  func(p *corev1.Pod) { p.OwnerReferences[0].BlockOwnerDeletion = new(true) },
		" with an account":      func(p *corev1.Pod) { p.Spec.ServiceAccountName = "default" },
		" with pull Secrets":    func(p *corev1.Pod) { p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{reference} },
		" with a Secret":        volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "secret-theirs"}}),
		" with a ConfigMap":     volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: reference}}),
		" with a volume claim":  volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "x"}}),
		" with a projected one": volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{Secret: &corev1.SecretProjection{LocalObjectReference: reference}}},
		}}),
		" with variables of one": func(p *corev1.Pod) {
			p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: reference}}}
		},
		" with a variable of one": func(p *corev1.Pod) {
			key := &corev1.SecretKeySelector{LocalObjectReference: reference, Key: "k"}
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: key}}}
		},
	}
}

// balancers makes Services that name TLS Secrets, of which one is served by nodes.
func balancers(t *testing.T, admin *kubernetes.Clientset) {
	t.Helper()
	for i, name := range []string{"lb-served", "lb-unserved", "lb-direct", "lb-cluster", "lb-foreign", "lb-unnamed", "lb-logs", "lb-nologs"} {
		for _, namespace := range []string{"default", "kube-public"} {
			if _, err := admin.CoreV1().Secrets(namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}},
				metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		v := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"fairlead.dev/lb-tls-secrets": name}}}
		v.Spec.Type, v.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: 443}}
		mode := corev1.LoadBalancerIPModeProxy
		switch name {
		case "lb-direct":
			mode = corev1.LoadBalancerIPModeVIP
		case "lb-cluster":
			v.Spec.Type = corev1.ServiceTypeClusterIP
		case "lb-foreign":
			v.Spec.LoadBalancerClass = new("example.com/other")
		case "lb-unnamed":
			v.Annotations = nil
		case "lb-logs", "lb-nologs": // files stay on the nodes without a bucket
			v.Annotations = map[string]string{"fairlead.dev/lb-access-log": "true", "fairlead.dev/lb-access-log-credentials": name}
			if name == "lb-logs" {
				v.Annotations["fairlead.dev/lb-access-log-bucket"] = "logs"
			}
		}
		v, err := admin.CoreV1().Services("default").Create(t.Context(), v, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if name == "lb-unserved" || name == "lb-cluster" {
			continue
		}
		v.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("198.51.100.%d", i+1), IPMode: &mode}}
		if _, err := admin.CoreV1().Services("default").UpdateStatus(t.Context(), v, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// Those that name by what Pods are verified.
	meta, create, mode := metav1.ObjectMeta{Name: "lb-authority"}, metav1.CreateOptions{}, corev1.LoadBalancerIPModeProxy
	_, err := admin.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: meta}, create)
	for _, namespace := range []string{"default", "kube-public"} {
		_, err2 := admin.CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: meta}, create)
		err = errors.Join(err, err2)
	}
	for i, kind := range []string{"secret", "configmap"} {
		v := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "lb-" + kind, Annotations: map[string]string{
			"fairlead.dev/lb-backend-protocol": "tls", "fairlead.dev/lb-backend-ca": kind + "/lb-authority"}}}
		v.Spec.Type, v.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: 443}}
		v, err2 := admin.CoreV1().Services("default").Create(t.Context(), v, create)
		if err = errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		v.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("198.51.100.%d", i+21), IPMode: &mode}}
		if _, err := admin.CoreV1().Services("default").UpdateStatus(t.Context(), v, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

func dnsSlice(node string) *discoveryv1.EndpointSlice {
	yes := true
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-dns-" + node,
			Labels: map[string]string{discoveryv1.LabelServiceName: "kube-dns", discoveryv1.LabelManagedBy: svc.DNSSliceManager,
				svc.NodeLabel: node}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes}}},
	}
}

// labelMine has c label the Node mine, with the value of a chosen one.
func labelMine(c *kubernetes.Clientset, key string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.CoreV1().Nodes().Patch(ctx, "mine", types.MergePatchType, []byte(`{"metadata":{"labels":{"`+key+`":"true"}}}`),
			metav1.PatchOptions{})
		return err
	}
}

// updateDNS has c write the slice of the node mine, changed by change.
func updateDNS(ctx context.Context, c *kubernetes.Clientset, change func(*discoveryv1.EndpointSlice)) error {
	e := ownedSlice(ctx, c, "mine")
	change(e)
	_, err := c.DiscoveryV1().EndpointSlices("kube-system").Update(ctx, e, metav1.UpdateOptions{})
	return err
}

// ownedSlice is dnsSlice with the Node as owner, if c may read that.
func ownedSlice(ctx context.Context, c *kubernetes.Clientset, node string) *discoveryv1.EndpointSlice {
	e := dnsSlice(node)
	if n, err := c.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); err == nil {
		e.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}
	}
	return e
}

// listDNS has c write the slice of the node mine, or another one of it, with an
// endpoint at each of the addresses.
func listDNS(ctx context.Context, c *kubernetes.Clientset, name string, addrs ...string) error {
	api, e := c.DiscoveryV1().EndpointSlices("kube-system"), ownedSlice(ctx, c, "mine")
	one := e.Endpoints[0]
	e.Endpoints = nil
	for _, a := range addrs {
		one.Addresses = []string{a}
		e.Endpoints = append(e.Endpoints, *one.DeepCopy())
	}
	if name != "" {
		e.Name = name
		_, err := api.Create(ctx, e, metav1.CreateOptions{})
		return err
	}
	_, err := api.Update(ctx, e, metav1.UpdateOptions{})
	return err
}

// markEnded has c take the DNS server of the other node out of kube-dns, and
// to another address if one is given.
func markEnded(ctx context.Context, admin, c *kubernetes.Clientset, addr string) error {
	e := dnsSlice("theirs")
	e.GenerateName, e.Name = "dns-", ""
	e, err := admin.DiscoveryV1().EndpointSlices("kube-system").Create(ctx, e, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("the administrator: %w", err)
	}
	no := false
	e.Endpoints[0].Conditions.Ready, e.Endpoints[0].Conditions.Serving = &no, &no
	if addr != "" {
		e.Endpoints[0].Addresses[0] = addr
	}
	_, err = c.DiscoveryV1().EndpointSlices("kube-system").Update(ctx, e, metav1.UpdateOptions{})
	return err
}
