package walk

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	manifests "github.com/fairlead/fairlead/deploy/kubernetes"
	"github.com/fairlead/fairlead/internal/migrate"
)

// manager is the field manager of what a walk writes.
const manager = "fairlead-migrate"

// objects are fairlead proxy's, and kube-proxy's DaemonSet.
type objects struct {
	all       []runtime.Object
	daemonSet *appsv1.DaemonSet
	kubeProxy *appsv1.DaemonSet
}

// newObjects reads the manifest, and makes its DaemonSet take the place of kube-proxy's.
func newObjects(theirs *appsv1.DaemonSet, s *migrate.Settings, image string) (*objects, error) {
	out := &objects{kubeProxy: theirs}
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifests.Proxy)))
	for {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode(text, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("the manifest of fairlead proxy: %w", err)
		}
		if d, ok := o.(*appsv1.DaemonSet); ok {
			out.daemonSet = migrate.Ours(d, theirs, s, image)
			o = out.daemonSet
		}
		out.all = append(out.all, o)
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

// place is where the API has an object.
func place(client kubernetes.Interface, o runtime.Object) (rest.Interface, string, error) {
	switch o := o.(type) {
	case *corev1.ServiceAccount:
		return client.CoreV1().RESTClient(), "/api/v1/namespaces/" + o.Namespace + "/serviceaccounts/" + o.Name, nil
	case *rbacv1.ClusterRole:
		return client.RbacV1().RESTClient(), "/apis/rbac.authorization.k8s.io/v1/clusterroles/" + o.Name, nil
	case *rbacv1.ClusterRoleBinding:
		return client.RbacV1().RESTClient(), "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/" + o.Name, nil
	case *appsv1.DaemonSet:
		return client.AppsV1().RESTClient(), "/apis/apps/v1/namespaces/" + o.Namespace + "/daemonsets/" + o.Name, nil
	}
	return nil, "", fmt.Errorf("the manifest of fairlead proxy has an object of type %T", o)
}

// create applies the objects, as 'kubectl apply --server-side' does.
func (o *objects) create(ctx context.Context, client kubernetes.Interface) error {
	for _, object := range o.all {
		api, path, err := place(client, object)
		if err != nil {
			return err
		}
		text, err := json.Marshal(object)
		if err != nil {
			return err
		}
		err = api.Patch(types.ApplyPatchType).AbsPath(path).Param("fieldManager", manager).Param("force", "true").Body(text).Do(ctx).Error()
		if err != nil {
			return fmt.Errorf("apply %s: %w", path, err)
		}
	}
	return nil
}

// remove deletes the objects.
func (o *objects) remove(ctx context.Context, client kubernetes.Interface) error {
	for _, object := range o.all {
		api, path, err := place(client, object)
		if err != nil {
			return err
		}
		background := metav1.DeletePropagationBackground
		err = api.Delete().AbsPath(path).Body(&metav1.DeleteOptions{PropagationPolicy: &background}).Do(ctx).Error()
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete %s: %w", path, err)
		}
	}
	return nil
}

// exclude keeps kube-proxy off changed nodes, and waits until its Pods are of that template.
func (w *Walk) exclude(ctx context.Context) error { return w.setKubeProxy(ctx, migrate.Exclude) }

// include gives kube-proxy its template back.
func (w *Walk) include(ctx context.Context) error { return w.setKubeProxy(ctx, migrate.Include) }

func (w *Walk) setKubeProxy(ctx context.Context, change func(*appsv1.DaemonSet) *appsv1.DaemonSet) error {
	api := w.Client.AppsV1().DaemonSets(w.cluster.KubeProxy.Namespace)
	name := w.cluster.KubeProxy.Name
	updating, cancel := context.WithTimeout(ctx, w.Timeout)
	defer cancel()
	err := w.await(updating, func() error { // a conflict is tried again
		d, err := api.Get(updating, name, metav1.GetOptions{})
		if err == nil {
			_, err = api.Update(updating, change(d), metav1.UpdateOptions{FieldManager: manager})
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("the DaemonSet %s: %w", name, err)
	}
	return w.rollOut(ctx, w.cluster.KubeProxy)
}
