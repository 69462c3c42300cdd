package act

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
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// Decode reads the objects of a manifest, in their order.
func Decode(manifest []byte) (out []runtime.Object, err error) {
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(manifest)))
	for {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode(text, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("cannot read the manifest: %w", err)
		}
		out = append(out, o)
	}
}

// place is where the API has an object.
func place(client kubernetes.Interface, o runtime.Object) (rest.Interface, string, error) {
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	switch o := o.(type) {
	case *corev1.ServiceAccount:
		return client.CoreV1().RESTClient(), "/api/v1/namespaces/" + o.Namespace + "/serviceaccounts/" + o.Name, nil
	case *rbacv1.ClusterRole:
		return client.RbacV1().RESTClient(), rbac + "clusterroles/" + o.Name, nil
	case *rbacv1.ClusterRoleBinding:
		return client.RbacV1().RESTClient(), rbac + "clusterrolebindings/" + o.Name, nil
	case *rbacv1.Role:
		return client.RbacV1().RESTClient(), rbac + "namespaces/" + o.Namespace + "/roles/" + o.Name, nil
	case *rbacv1.RoleBinding:
		return client.RbacV1().RESTClient(), rbac + "namespaces/" + o.Namespace + "/rolebindings/" + o.Name, nil
	case *policyv1.PodDisruptionBudget:
		return client.PolicyV1().RESTClient(), "/apis/policy/v1/namespaces/" + o.Namespace + "/poddisruptionbudgets/" + o.Name, nil
	case *appsv1.DaemonSet:
		return client.AppsV1().RESTClient(), "/apis/apps/v1/namespaces/" + o.Namespace + "/daemonsets/" + o.Name, nil
	case *appsv1.Deployment:
		return client.AppsV1().RESTClient(), "/apis/apps/v1/namespaces/" + o.Namespace + "/deployments/" + o.Name, nil
	}
	return nil, "", fmt.Errorf("cannot apply an object of type %T", o)
}

// Apply applies objects, as 'kubectl apply --server-side' does.
func (c *Cluster) Apply(ctx context.Context, objects []runtime.Object) error {
	for _, o := range objects {
		api, path, err := place(c.Client, o)
		if err != nil {
			return err
		}
		text, err := json.Marshal(o)
		if err != nil {
			return err
		}
		err = api.Patch(types.ApplyPatchType).AbsPath(path).Param("fieldManager", Manager).Param("force", "true").Body(text).Do(ctx).Error()
		if err != nil {
			return fmt.Errorf("apply %s: %w", path, err)
		}
	}
	return nil
}

// Remove deletes objects. Pods that belong to them are deleted after them.
func (c *Cluster) Remove(ctx context.Context, objects []runtime.Object) error {
	for _, o := range objects {
		api, path, err := place(c.Client, o)
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
