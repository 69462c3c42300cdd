package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"
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
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: set}, Spec: pod.Spec}
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
		enc := json.NewEncoder(r.out)
		enc.SetIndent("", "  ")
		return enc.Encode(out)
	}
	text, err := yaml.Marshal(out)
	if err == nil {
		_, err = r.out.Write(text)
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
	if r.everyNode {
		s.kind = kindDaemonSet
		_, err = client.AppsV1().DaemonSets(namespace).Patch(ctx, s.name, types.ApplyPatchType, text, options)
	} else {
		_, err = client.AppsV1().Deployments(namespace).Patch(ctx, s.name, types.ApplyPatchType, text, options)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(r.err, "%s %s applied\n", s.kind, s.name)
	return r.awaitSet(ctx, client, namespace, s, r.timeout)
}

const (
	kindDeployment = "deployment"
	kindDaemonSet  = "daemonset"
)

// set is what the commands for sets show of a Deployment or DaemonSet.
type set struct {
	kind, name                        string
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
		kind: kindDeployment, name: d.Name, ready: d.Status.ReadyReplicas, updated: d.Status.UpdatedReplicas,
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
		kind: kindDaemonSet, name: d.Name, wanted: d.Status.DesiredNumberScheduled, ready: d.Status.NumberReady,
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

// awaitSet waits until a set has what it asks for.
func (g *global) awaitSet(ctx context.Context, client kubernetes.Interface, namespace string, s set, timeout time.Duration) error {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		now, err := findSet(limited, client, namespace, s.name)
		switch {
		case err == nil && now.done():
			fmt.Fprintf(g.err, "%s %s ready: %d of %d\n", now.kind, now.name, now.available, now.wanted)
			return nil
		case err == nil:
			s = now
		case ctx.Err() == nil && limited.Err() == nil:
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-limited.Done():
			why := s.trouble
			if why == "" {
				why = podTrouble(ctx, client, namespace, &s)
			}
			return fmt.Errorf("%s %s is not ready after %s: %d of %d available; %s", s.kind, s.name, timeout, s.available, s.wanted, why)
		case <-time.After(setPoll):
		}
	}
}

// podTrouble returns what keeps one of the set's Pods from being ready.
func podTrouble(ctx context.Context, client kubernetes.Interface, namespace string, s *set) string {
	pods, err := podsOf(ctx, client, namespace, s)
	if err != nil {
		return oneLine(err)
	}
	for i := range pods {
		if p := &pods[i]; !ready(p) {
			if why := cannotStart(p); why != "" {
				return p.Name + ": " + why
			}
			return p.Name + ": " + trouble(p)
		}
	}
	return "its Pods are ready"
}

func podsOf(ctx context.Context, client kubernetes.Interface, namespace string, s *set) ([]corev1.Pod, error) {
	list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(s.selector)})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// setCommand is a command about a set, or all.
type setCommand struct {
	*global
	clientFlags
}

// newSetCommand builds one with least to most arguments.
func newSetCommand(g *global, c *cobra.Command, least, most int,
	run func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error,
) *cobra.Command {
	s := &setCommand{global: g}
	s.add(c)
	s.addNamespace(c)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usagef("want: %s", cmd.UseLine())
		}
		client, namespace, err := s.client()
		if err != nil {
			return err
		}
		return run(cmd.Context(), s, client, namespace, args)
	}
	return c
}

func newScale(g *global) *cobra.Command {
	return newSetCommand(g, &cobra.Command{
		Use: "scale NAME REPLICAS", Short: "Change the number of Pods of a set", Example: "  fairlead scale web 5",
	}, 2, 2, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		n, err := strconv.ParseUint(args[1], 10, 31)
		if err != nil || n > maxReplicas {
			return usagef("%q is no number of Pods; want 0 to %d", args[1], maxReplicas)
		}
		found, err := findSet(ctx, client, namespace, args[0])
		if err != nil {
			return err
		}
		if found.kind != kindDeployment {
			return fmt.Errorf("%s %s has a Pod on every node and cannot be scaled", found.kind, found.name)
		}
		patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, n)
		_, err = client.AppsV1().Deployments(namespace).Patch(ctx, found.name, types.MergePatchType, patch, metav1.PatchOptions{}, "scale")
		if err != nil {
			return err
		}
		return s.awaitSet(ctx, client, namespace, found, time.Minute)
	})
}

func newRestart(g *global) *cobra.Command {
	return newSetCommand(g, &cobra.Command{
		Use: "restart NAME", Short: "Replace the Pods of a set, one after the other", Example: "  fairlead restart web",
	}, 1, 1, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		found, err := findSet(ctx, client, namespace, args[0])
		if err != nil {
			return err
		}
		patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{%q:%q}}}}}`, restartAnnotation,
			time.Now().Format(time.RFC3339Nano))
		if found.kind == kindDeployment {
			_, err = client.AppsV1().Deployments(namespace).Patch(ctx, found.name, types.MergePatchType, patch, metav1.PatchOptions{})
		} else {
			_, err = client.AppsV1().DaemonSets(namespace).Patch(ctx, found.name, types.MergePatchType, patch, metav1.PatchOptions{})
		}
		if err != nil {
			return err
		}
		return s.awaitSet(ctx, client, namespace, found, 5*time.Minute)
	})
}

func newRm(g *global) *cobra.Command {
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
				fmt.Fprintf(s.err, "%s %s removed\n", found.kind, found.name)
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

func newPs(g *global) *cobra.Command {
	return newSetCommand(g, &cobra.Command{
		Use: "ps [NAME]", Short: "List sets, or the Pods of one", Example: "  fairlead ps\n  fairlead ps web",
	}, 0, 1, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		if len(args) == 1 {
			found, err := findSet(ctx, client, namespace, args[0])
			if err != nil {
				return err
			}
			pods, err := podsOf(ctx, client, namespace, &found)
			if err != nil {
				return err
			}
			return printPods(s.out, pods)
		}
		deployments, err := client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		daemons, err := client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var all []set
		for i := range deployments.Items {
			all = append(all, ofDeployment(&deployments.Items[i]))
		}
		for i := range daemons.Items {
			all = append(all, ofDaemonSet(&daemons.Items[i]))
		}
		return printSets(s.out, all)
	})
}

func printSets(out io.Writer, all []set) error {
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	fmt.Fprintln(w, "NAME\tKIND\tREADY\tUP-TO-DATE\tAVAILABLE\tAGE\tCOMMAND")
	for _, s := range all {
		fmt.Fprintf(w, "%s\t%s\t%d/%d\t%d\t%d\t%s\t%s\n", s.name, s.kind, s.ready, s.wanted, s.updated, s.available,
			duration.HumanDuration(time.Since(s.created.Time)), strings.Join(s.command, " "))
	}
	return w.Flush()
}

func printPods(out io.Writer, pods []corev1.Pod) error {
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	fmt.Fprintln(w, "POD\tREADY\tSTATUS\tRESTARTS\tAGE\tNODE\tADDRESS")
	for i := range pods {
		p := &pods[i]
		status, restarts := string(p.Status.Phase), int32(0)
		if p.DeletionTimestamp != nil {
			status = "Terminating"
		}
		for _, c := range p.Status.ContainerStatuses {
			restarts += c.RestartCount
		}
		fmt.Fprintf(w, "%s\t%t\t%s\t%d\t%s\t%s\t%s\n", p.Name, ready(p), status, restarts,
			duration.HumanDuration(time.Since(p.CreationTimestamp.Time)), p.Spec.NodeName, p.Status.PodIP)
	}
	return w.Flush()
}

func newLogs(g *global) *cobra.Command {
	var follow bool
	var tail int64
	c := newSetCommand(g, &cobra.Command{
		Use: "logs NAME", Short: "Print what the Pods of a set have written", Example: "  fairlead logs web\n  fairlead logs -f web",
	}, 1, 1, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		found, err := findSet(ctx, client, namespace, args[0])
		if err != nil {
			return err
		}
		pods, err := podsOf(ctx, client, namespace, &found)
		if err != nil {
			return err
		}
		if follow {
			r := runCommand{global: s.global}
			var names []string
			for i := range pods {
				names = append(names, pods[i].Name)
			}
			return r.follow(ctx, client, namespace, names)
		}
		return s.logs(ctx, client, namespace, pods, tail)
	})
	c.Flags().BoolVarP(&follow, "follow", "f", false, "go on printing until interrupted")
	c.Flags().Int64Var(&tail, "tail", -1, "lines of each Pod to print, the last ones; -1 is all")
	return c
}

// logs prints the logs of Pods, one after the other, each line with its Pod's name.
func (s *setCommand) logs(ctx context.Context, client kubernetes.Interface, namespace string, pods []corev1.Pod, tail int64) error {
	texts, errs := make([]string, len(pods)), make([]error, len(pods))
	var wg sync.WaitGroup
	for i := range pods {
		wg.Go(func() {
			o := &corev1.PodLogOptions{}
			if tail >= 0 {
				o.TailLines = &tail
			}
			text, err := client.CoreV1().Pods(namespace).GetLogs(pods[i].Name, o).DoRaw(ctx)
			texts[i], errs[i] = string(text), err
		})
	}
	wg.Wait()
	for i, text := range texts {
		for line := range strings.Lines(text) {
			fmt.Fprintf(s.out, "%s: %s\n", pods[i].Name, strings.TrimSuffix(line, "\n"))
		}
	}
	return errors.Join(errs...)
}
