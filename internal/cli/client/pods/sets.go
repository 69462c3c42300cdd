package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/cli/base"
)

const (
	// runLabel is on the Pods of a set that 'fairlead run' has made, with its name.
	runLabel = "fairlead.dev/run"
	// restartAnnotation of a template is the one of kubectl rollout restart.
	restartAnnotation = "kubectl.kubernetes.io/restartedAt"
	runManager        = "fairlead-run"
	// setPoll is the time between two looks at a set that is waited for.
	setPoll = 200 * time.Millisecond
)

// object is the set of the Pods, or the Pod itself.
func (r *runCommand) object(pod *corev1.Pod) runtime.Object {
	if !r.asSet {
		pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
		return pod
	}
	selector := map[string]string{runLabel: r.podFlags.name}
	set := maps.Clone(selector)
	if len(pod.Labels) == 0 {
		set["app"] = r.podFlags.name // what a Service would select by
	}
	maps.Copy(set, pod.Labels)
	meta := metav1.ObjectMeta{
		Name: r.podFlags.name, Labels: set,
		Annotations: map[string]string{"kubernetes.io/change-cause": "fairlead run -- " + strings.Join(r.command, " ")},
	}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: set, Annotations: pod.Annotations}, Spec: pod.Spec}
	by := &metav1.LabelSelector{MatchLabels: selector}
	if r.everyNode {
		return &appsv1.DaemonSet{
			TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "DaemonSet"}, ObjectMeta: meta,
			Spec: appsv1.DaemonSetSpec{Selector: by, Template: template},
		}
	}
	return &appsv1.Deployment{
		TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"}, ObjectMeta: meta,
		Spec: appsv1.DeploymentSpec{Replicas: new(int32(r.replicas)), Selector: by, Template: template},
	}
}

// content is an object as its author has written it, without what is empty.
func content(obj runtime.Object) (map[string]any, error) {
	out, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, err
	}
	delete(out, "status")
	dropEmpty(out)
	return out, nil
}

// dropEmpty removes null values and empty structures, of which the API types print some.
func dropEmpty(m map[string]any) {
	for k, v := range m {
		below, ok := v.(map[string]any)
		if ok {
			dropEmpty(below)
		}
		if v == nil || ok && len(below) == 0 && k != "emptyDir" {
			delete(m, k)
		}
	}
}

func (r *runCommand) print(pod *corev1.Pod) error {
	out, err := content(r.object(pod))
	if err != nil {
		return err
	}
	if r.output == "json" {
		enc := json.NewEncoder(r.Out)
		enc.SetIndent("", "  ")
		return enc.Encode(out)
	}
	text, err := yaml.Marshal(out)
	if err == nil {
		_, err = r.Out.Write(text)
	}
	return err
}

// apply creates the set, or changes the one of its name, and waits until it is ready.
func (r *runCommand) apply(ctx context.Context, client kubernetes.Interface, namespace string, pod *corev1.Pod) error {
	out, err := content(r.object(pod))
	if err != nil {
		return err
	}
	text, err := json.Marshal(out)
	if err != nil {
		return err
	}
	options := metav1.PatchOptions{FieldManager: runManager, Force: new(true)}
	s := set{kind: kindDeployment, name: r.podFlags.name}
	if err := r.rejectOtherKind(ctx, client, namespace); err != nil {
		return err
	}
	if r.everyNode {
		s.kind = kindDaemonSet
		_, err = client.AppsV1().DaemonSets(namespace).Patch(ctx, s.name, types.ApplyPatchType, text, options)
	} else {
		_, err = client.AppsV1().Deployments(namespace).Patch(ctx, s.name, types.ApplyPatchType, text, options)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(r.Err, "%s %s applied\n", s.kind, s.name)
	if r.detach {
		return nil
	}
	return awaitSet(ctx, r.Err, client, namespace, s, r.timeout)
}

// rejectOtherKind rejects the name of a set of the other kind: both would select the same
// Pods, and the commands for sets know one by its name.
func (r *runCommand) rejectOtherKind(ctx context.Context, client kubernetes.Interface, namespace string) error {
	name, other := r.podFlags.name, kindDaemonSet
	var err error
	if r.everyNode {
		other = kindDeployment
		_, err = client.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
	} else {
		_, err = client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
	}
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("there is a %s %s in namespace %s: remove it with 'fairlead rm %s', or choose another --name",
		other, name, namespace, name)
}

const (
	kindDeployment = "deployment"
	kindDaemonSet  = "daemonset"
)

// set is what the commands for sets show of a Deployment or DaemonSet.
type set struct {
	kind, namespace, name             string
	wanted, ready, updated, available int32
	total                             int32 // of all revisions
	generation, observed              int64
	created                           metav1.Time
	command                           []string
	selector                          *metav1.LabelSelector
	trouble                           string
}

func ofDeployment(d *appsv1.Deployment) set {
	s := set{
		kind: kindDeployment, namespace: d.Namespace, name: d.Name, ready: d.Status.ReadyReplicas, updated: d.Status.UpdatedReplicas,
		available: d.Status.AvailableReplicas, total: d.Status.Replicas, generation: d.Generation, observed: d.Status.ObservedGeneration,
		created: d.CreationTimestamp, command: commandOf(&d.Spec.Template.Spec), selector: d.Spec.Selector,
	}
	if d.Spec.Replicas != nil {
		s.wanted = *d.Spec.Replicas
	}
	for _, c := range d.Status.Conditions {
		if c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue ||
			c.Type == appsv1.DeploymentProgressing && c.Status == corev1.ConditionFalse {
			s.trouble = c.Message
		}
	}
	return s
}

func ofDaemonSet(d *appsv1.DaemonSet) set {
	return set{
		kind: kindDaemonSet, namespace: d.Namespace, name: d.Name, wanted: d.Status.DesiredNumberScheduled, ready: d.Status.NumberReady,
		updated: d.Status.UpdatedNumberScheduled, available: d.Status.NumberAvailable, total: d.Status.DesiredNumberScheduled,
		generation: d.Generation, observed: d.Status.ObservedGeneration, created: d.CreationTimestamp,
		command: commandOf(&d.Spec.Template.Spec), selector: d.Spec.Selector,
	}
}

func commandOf(s *corev1.PodSpec) []string {
	if len(s.Containers) == 0 {
		return nil
	}
	return append(append([]string{}, s.Containers[0].Command...), s.Containers[0].Args...)
}

// done reports whether all Pods of the set are of its present revision and available.
func (s *set) done() bool {
	return s.observed >= s.generation && s.updated == s.wanted && s.available == s.wanted && s.total == s.wanted
}

// findSet returns the Deployment or DaemonSet of a name.
func findSet(ctx context.Context, client kubernetes.Interface, namespace, name string) (set, error) {
	d, err := client.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
	if err == nil {
		return ofDeployment(d), nil
	}
	if !apierrors.IsNotFound(err) {
		return set{}, err
	}
	ds, err := client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
	if err == nil {
		return ofDaemonSet(ds), nil
	}
	if !apierrors.IsNotFound(err) {
		return set{}, err
	}
	return set{}, fmt.Errorf("there is no set %s in namespace %s; 'fairlead ps' lists them", name, namespace)
}

// patch merges a patch into the set, or into a subresource of it.
func (s *set) patch(ctx context.Context, client kubernetes.Interface, namespace string, patch []byte, subresource ...string) error {
	var err error
	if s.kind == kindDeployment {
		_, err = client.AppsV1().Deployments(namespace).Patch(ctx, s.name, types.MergePatchType, patch, metav1.PatchOptions{}, subresource...)
	} else {
		_, err = client.AppsV1().DaemonSets(namespace).Patch(ctx, s.name, types.MergePatchType, patch, metav1.PatchOptions{}, subresource...)
	}
	return err
}

// awaitSet waits until a set has what it asks for.
func awaitSet(ctx context.Context, progress io.Writer, client kubernetes.Interface, namespace string, s set, timeout time.Duration) error {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	told := ""
	for n := 0; ; n++ {
		now, err := findSet(limited, client, namespace, s.name)
		switch {
		case err == nil && now.done():
			fmt.Fprintf(progress, "%s %s ready: %d of %d\n", now.kind, now.name, now.available, now.wanted)
			return nil
		case err == nil:
			s = now
			if n%10 == 9 { // a list of Pods costs more
				if why := cannotStartAny(limited, client, namespace, &s); why != "" && why != told {
					told = why
					fmt.Fprintln(progress, why)
				}
			}
		case ctx.Err() == nil && limited.Err() == nil:
			return err
		}
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return fmt.Errorf("interrupted; no longer waiting for %s %s, which keeps running: %w", s.kind, s.name, ctx.Err())
			}
			why := s.trouble
			if why == "" {
				why = podTrouble(ctx, client, namespace, &s)
			}
			return fmt.Errorf("%s %s is not ready after %s: %d of %d available; %s", s.kind, s.name, timeout, s.available, s.wanted, why)
		case <-time.After(setPoll):
		}
	}
}

// cannotStartAny returns why a Pod of the set cannot be started, "" if each can.
func cannotStartAny(ctx context.Context, client kubernetes.Interface, namespace string, s *set) string {
	pods, err := podsOf(ctx, client, namespace, s)
	for i := range pods {
		if why := cannotStart(&pods[i]); err == nil && why != "" && !ready(&pods[i]) {
			return fmt.Sprintf("pod %s cannot be started: %s", pods[i].Name, why)
		}
	}
	return ""
}

// podTrouble returns what keeps one of the set's Pods from being ready.
func podTrouble(ctx context.Context, client kubernetes.Interface, namespace string, s *set) string {
	pods, err := podsOf(ctx, client, namespace, s)
	if err != nil {
		return base.OneLine(err)
	}
	for i := range pods {
		if p := &pods[i]; !ready(p) {
			if why := cannotStart(p); why != "" {
				return p.Name + ": " + why
			}
			return p.Name + ": " + base.PodTrouble(p)
		}
	}
	return "its Pods are ready"
}

// setCommand is a command about a set, or all.
type setCommand struct {
	*base.Global
	base.ClientFlags
}

// newSetCommand builds one with least to most arguments.
func newSetCommand(g *base.Global, c *cobra.Command, least, most int,
	run func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error,
) *cobra.Command {
	s := &setCommand{Global: g}
	s.Add(c)
	s.AddNamespace(c)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return base.Usagef("want: %s", cmd.UseLine())
		}
		client, namespace, err := s.Client()
		if err != nil {
			return err
		}
		return run(cmd.Context(), s, client, namespace, args)
	}
	return c
}

// NewScale returns 'fairlead scale'.
func NewScale(g *base.Global) *cobra.Command {
	return newSetCommand(g, &cobra.Command{
		Use: "scale NAME REPLICAS", Short: "Change the number of Pods of a set", Example: "  fairlead scale web 5",
	}, 2, 2, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		n, err := strconv.ParseUint(args[1], 10, 31)
		if err != nil || n > maxReplicas {
			return base.Usagef("%q is not a number of Pods; want 0 to %d", args[1], maxReplicas)
		}
		found, err := findSet(ctx, client, namespace, args[0])
		if err != nil {
			return err
		}
		if found.kind != kindDeployment {
			return fmt.Errorf("%s %s has a Pod on every node and cannot be scaled", found.kind, found.name)
		}
		if err := found.patch(ctx, client, namespace, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, n), "scale"); err != nil {
			return err
		}
		return awaitSet(ctx, s.Err, client, namespace, found, time.Minute)
	})
}

// NewRestart returns 'fairlead restart'.
func NewRestart(g *base.Global) *cobra.Command {
	return newSetCommand(g, &cobra.Command{
		Use: "restart NAME", Short: "Replace the Pods of a set, one after the other", Example: "  fairlead restart web",
	}, 1, 1, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		found, err := findSet(ctx, client, namespace, args[0])
		if err != nil {
			return err
		}
		patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{%q:%q}}}}}`, restartAnnotation,
			time.Now().Format(time.RFC3339Nano))
		if err := found.patch(ctx, client, namespace, patch); err != nil {
			return err
		}
		return awaitSet(ctx, s.Err, client, namespace, found, 5*time.Minute)
	})
}

// NewRm returns 'fairlead rm'.
func NewRm(g *base.Global) *cobra.Command {
	return newSetCommand(g, &cobra.Command{
		Use: "rm NAME", Short: "Remove a set with its Pods", Example: "  fairlead rm web",
	}, 1, 1, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		found, err := findSet(ctx, client, namespace, args[0])
		if err != nil {
			return err
		}
		options := metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)}
		if found.kind == kindDeployment {
			err = client.AppsV1().Deployments(namespace).Delete(ctx, found.name, options)
		} else {
			err = client.AppsV1().DaemonSets(namespace).Delete(ctx, found.name, options)
		}
		if err != nil {
			return err
		}
		limited, cancel := context.WithTimeout(ctx, 2*time.Minute)
		defer cancel()
		for {
			pods, err := podsOf(limited, client, namespace, &found)
			if err == nil && len(pods) == 0 {
				fmt.Fprintf(s.Err, "%s %s removed\n", found.kind, found.name)
				return nil
			}
			select {
			case <-limited.Done():
				return errors.Join(fmt.Errorf("%s %s: %d Pods have not ended", found.kind, found.name, len(pods)), err)
			case <-time.After(setPoll):
			}
		}
	})
}
