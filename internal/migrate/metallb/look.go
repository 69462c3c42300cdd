package metallb

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/svc"
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
	services, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range services.Items {
		c.Services = append(c.Services, &services.Items[i])
	}
	return c, nil
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
