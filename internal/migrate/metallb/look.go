package metallb

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/kubevip"
	"github.com/fairlead/fairlead/internal/lb/metallb"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/workloads"
)

// group is the group of MetalLB's objects.
const group = "metallb.io"

// resources are MetalLB's configuration, as v0.16 has it.
func resources() []string {
	return []string{
		"v1beta1/ipaddresspools", "v1beta1/l2advertisements", "v1beta1/bgpadvertisements", "v1beta2/bgppeers", "v1beta1/communities",
		"v1beta1/bfdprofiles",
	}
}

// selectors select MetalLB's programs: its manifests and its Helm chart have different labels.
func selectors(component string) []labels.Set {
	return []labels.Set{
		{"app": "metallb", "component": component},
		{"app.kubernetes.io/name": "metallb", "app.kubernetes.io/component": component},
	}
}

// Look reads what runs on a cluster.
func Look(ctx context.Context, client kubernetes.Interface) (*Cluster, error) {
	c := &Cluster{}
	namespace := ""
	for _, s := range selectors("speaker") {
		list, err := client.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{LabelSelector: s.String()})
		if err != nil {
			return nil, err
		}
		for i := range list.Items {
			if c.Speaker != nil {
				return nil, fmt.Errorf("there are two DaemonSets of MetalLB's speaker: %s/%s and %s/%s", namespace, c.Speaker.Name,
					list.Items[i].Namespace, list.Items[i].Name)
			}
			c.Speaker, namespace = &list.Items[i], list.Items[i].Namespace
		}
	}
	for _, s := range selectors("controller") {
		list, err := client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{LabelSelector: s.String()})
		if err != nil {
			return nil, err
		}
		for i := range list.Items {
			c.Controller = &list.Items[i]
		}
	}
	all, err := client.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{}) // kube-vip's have no label of all its manifests
	if err != nil {
		return nil, err
	}
	for i := range all.Items {
		if kubevip.ContainerOf(&all.Items[i].Spec.Template.Spec) != nil {
			c.KubeVIP = append(c.KubeVIP, &all.Items[i])
		}
	}
	ours, err := client.AppsV1().DaemonSets(svc.SystemNamespace).Get(ctx, Name, metav1.GetOptions{})
	switch {
	case err == nil:
		c.Fairlead = ours
	case !apierrors.IsNotFound(err):
		return nil, err
	}
	if err := c.lookAtObjects(ctx, client, namespace); err != nil {
		return nil, err
	}
	if c.Speaker == nil {
		c.Services, err = services(ctx, client)
		return c, err
	}
	if c.Sessions, err = LookAtSessions(ctx, client, c.Speaker, nil, nil); err != nil {
		return nil, err
	}
	c.Services = c.Sessions.Services
	return c, c.lookAtSecrets(ctx, client, namespace)
}

func services(ctx context.Context, client kubernetes.Interface) (out []*corev1.Service, err error) {
	list, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		out = append(out, &list.Items[i])
	}
	return out, nil
}

// lookAtSecrets reads the Secrets that MetalLB's BGPPeers name.
func (c *Cluster) lookAtSecrets(ctx context.Context, client kubernetes.Interface, namespace string) error {
	c.Secrets = map[string]*corev1.Secret{}
	for _, name := range secretNames(c.Objects) {
		s, err := client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
		switch {
		case err == nil:
			c.Secrets[name] = s
		case !apierrors.IsNotFound(err):
			return err
		}
	}
	return nil
}

// secretNames are the names of the Secrets of MetalLB's namespace in its objects, none if these are refused.
func secretNames(objects []byte) (out []string) {
	r, err := metallb.Convert(bytes.NewReader(objects))
	if err != nil {
		return nil
	}
	for _, peer := range r.Peers {
		if ref := peer.Spec.PasswordSecretRef; ref != nil && !inline(peer, r.Passwords) {
			out = append(out, ref.Name)
		}
	}
	return out
}

// LookAtSessions reads the nodes on which Pods of MetalLB's speakers or of fairlead lb run, with their Speakers, and what they
// have to announce. The latter is taken from before, if that is not nil.
func LookAtSessions(
	ctx context.Context, client kubernetes.Interface, speaker *appsv1.DaemonSet, ours []v1.Speaker, before *Sessions,
) (*Sessions, error) {
	ready := map[string]bool{} // by the nodes of MetalLB's Pods
	selector, err := metav1.LabelSelectorAsSelector(speaker.Spec.Selector)
	if err != nil {
		return nil, err
	}
	pods, err := client.CoreV1().Pods(speaker.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return nil, err
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		ready[p.Spec.NodeName] = ready[p.Spec.NodeName] || workloads.IsReady(p) && p.DeletionTimestamp == nil
	}
	speakers := map[string]*v1.Speaker{}
	for i := range ours {
		speakers[ours[i].Name] = &ours[i]
	}
	out := &Sessions{Endpoints: map[svc.Name]map[string]bool{}}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if _, runs := ready[n.Name]; runs || speakers[n.Name] != nil || n.Labels[NodeLabel] != "" {
			out.Nodes = append(out.Nodes, Node{Name: n.Name, Labels: n.Labels, Ready: ready[n.Name], Speaker: speakers[n.Name]})
		}
	}
	if before != nil {
		out.Services, out.Endpoints = before.Services, before.Endpoints
		return out, nil
	}
	if out.Services, err = services(ctx, client); err != nil {
		return nil, err
	}
	slices, err := client.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range slices.Items {
		out.addEndpoints(&slices.Items[i])
	}
	return out, nil
}

func (s *Sessions) addEndpoints(o *discoveryv1.EndpointSlice) {
	of := svc.Name{Namespace: o.Namespace, Name: o.Labels[discoveryv1.LabelServiceName]}
	for _, e := range o.Endpoints {
		if e.NodeName == nil || e.Conditions.Ready != nil && !*e.Conditions.Ready {
			continue
		}
		if s.Endpoints[of] == nil {
			s.Endpoints[of] = map[string]bool{}
		}
		s.Endpoints[of][*e.NodeName] = true
	}
}

// lookAtObjects reads the objects of a namespace, of all if it is empty, where the cluster has the group.
func (c *Cluster) lookAtObjects(ctx context.Context, client kubernetes.Interface, namespace string) error {
	groups, err := discovery.ToDiscoveryInterfaceWithContext(client.Discovery()).ServerGroupsWithContext(ctx)
	if err != nil {
		return err
	}
	served := ""
	for _, g := range groups.Groups {
		for _, v := range g.Versions {
			if g.Name == group {
				served += v.Version + " "
			}
		}
	}
	if served == "" {
		return nil
	}
	var out bytes.Buffer
	for _, r := range resources() {
		version, plural, _ := strings.Cut(r, "/")
		if !strings.Contains(served, version+" ") {
			continue
		}
		path := "/apis/" + group + "/" + version
		if namespace != "" {
			path += "/namespaces/" + namespace
		}
		text, err := client.Discovery().RESTClient().Get().AbsPath(path, plural).SetHeader("Accept", "application/json").DoRaw(ctx)
		if apierrors.IsNotFound(err) { // an older MetalLB has not all of them
			continue
		}
		if err != nil {
			return fmt.Errorf("list %s.%s: %w", plural, group, err)
		}
		out.Write(text)
		out.WriteByte('\n')
	}
	c.Objects = out.Bytes()
	return nil
}
