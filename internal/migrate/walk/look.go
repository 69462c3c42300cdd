package walk

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/svc"
)

// The names that kubeadm and its like give.
const (
	kubeProxyName = "kube-proxy"
	fairleadName  = "fairlead-proxy" // the manifest's
)

// Look reads what runs on a cluster.
func Look(ctx context.Context, client kubernetes.Interface) (*migrate.Cluster, error) {
	c := &migrate.Cluster{ConfigMaps: map[string]*corev1.ConfigMap{}}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range nodes.Items {
		c.Nodes = append(c.Nodes, &nodes.Items[i])
	}
	for name, to := range map[string]**appsv1.DaemonSet{kubeProxyName: &c.KubeProxy, fairleadName: &c.Fairlead} {
		d, err := client.AppsV1().DaemonSets(svc.SystemNamespace).Get(ctx, name, metav1.GetOptions{})
		switch {
		case err == nil:
			*to = d
		case !apierrors.IsNotFound(err):
			return nil, err
		}
	}
	configs, err := client.CoreV1().ConfigMaps(svc.SystemNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range configs.Items {
		c.ConfigMaps[configs.Items[i].Name] = &configs.Items[i]
	}
	services, err := client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range services.Items {
		c.Services = append(c.Services, &services.Items[i])
	}
	return c, lookAtPods(ctx, client, c)
}

// lookAtPods reads the Pods of kube-proxy.
func lookAtPods(ctx context.Context, client kubernetes.Interface, c *migrate.Cluster) error {
	if c.KubeProxy == nil {
		return nil
	}
	selector, err := metav1.LabelSelectorAsSelector(c.KubeProxy.Spec.Selector)
	if err != nil {
		return err
	}
	pods, err := client.CoreV1().Pods(svc.SystemNamespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return err
	}
	for i := range pods.Items {
		c.Pods = append(c.Pods, &pods.Items[i])
	}
	return nil
}
