package walk

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	manifests "github.com/fairlead/fairlead/deploy/kubernetes"
	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/act"
)

// objects are fairlead proxy's, and kube-proxy's DaemonSet.
type objects struct {
	all       []runtime.Object
	daemonSet *appsv1.DaemonSet
	kubeProxy *appsv1.DaemonSet
}

// newObjects reads the manifest, and makes its DaemonSet take the place of kube-proxy's.
func newObjects(theirs *appsv1.DaemonSet, s *migrate.Settings, image string) (*objects, error) {
	out := &objects{kubeProxy: theirs}
	var err error
	if out.all, err = act.Decode(manifests.Proxy); err != nil {
		return nil, err
	}
	for i, o := range out.all {
		if d, ok := o.(*appsv1.DaemonSet); ok {
			out.daemonSet = migrate.Ours(d, theirs, s, image)
			out.all[i] = out.daemonSet
		}
	}
	if out.daemonSet == nil {
		return nil, errors.New("the manifest of fairlead proxy has no DaemonSet")
	}
	return out, nil
}

// of returns a program's DaemonSet.
func (o *objects) of(p migrate.Program) *appsv1.DaemonSet {
	if p == migrate.KubeProxy {
		return o.kubeProxy
	}
	return o.daemonSet
}

// exclude keeps kube-proxy off changed nodes, and waits until its Pods are of that template.
func (w *Walk) exclude(ctx context.Context) error { return w.setKubeProxy(ctx, migrate.Exclude) }

// include gives kube-proxy its template back.
func (w *Walk) include(ctx context.Context) error { return w.setKubeProxy(ctx, migrate.Include) }

func (w *Walk) setKubeProxy(ctx context.Context, change func(*appsv1.DaemonSet) *appsv1.DaemonSet) error {
	api := w.Client.AppsV1().DaemonSets(w.cluster.KubeProxy.Namespace)
	name := w.cluster.KubeProxy.Name
	err := w.act.Within(ctx, func(ctx context.Context) error { // a conflict is tried again
		d, err := api.Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			_, err = api.Update(ctx, change(d), metav1.UpdateOptions{FieldManager: act.Manager})
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("the DaemonSet %s: %w", name, err)
	}
	return w.rollOut(ctx, w.cluster.KubeProxy)
}
