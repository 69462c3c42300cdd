package pods

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// podsOf returns the Pods that the set's controllers have made or adopted.
func podsOf(ctx context.Context, client kubernetes.Interface, namespace string, s *set) ([]corev1.Pod, error) {
	list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(s.selector)})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return !s.owns(&p) }), nil
}

// owns reports whether the controller of p is of the set's kind: a Deployment
// has the Pods of its ReplicaSets.
func (s *set) owns(p *corev1.Pod) bool {
	o := metav1.GetControllerOf(p)
	if s.kind == kindDaemonSet {
		return o != nil && o.Kind == "DaemonSet" && o.Name == s.name
	}
	return o != nil && o.Kind == "ReplicaSet" && o.Name == s.name+"-"+p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
}

// NewPs returns 'fairlead ps'.
func NewPs(g *base.Global) *cobra.Command {
	everywhere := false
	c := newSetCommand(g, &cobra.Command{
		Use: "ps [NAME]", Short: "List sets, or the Pods of one", Example: "  fairlead ps\n  fairlead ps web\n  fairlead ps -A",
	}, 0, 1, func(ctx context.Context, s *setCommand, client kubernetes.Interface, namespace string, args []string) error {
		switch {
		case everywhere:
			namespace = metav1.NamespaceAll
		case len(args) == 1:
			found, err := findSet(ctx, client, namespace, args[0])
			if err != nil {
				return err
			}
			pods, err := podsOf(ctx, client, namespace, &found)
			if err != nil {
				return err
			}
			return printPods(s.Out, pods)
		}
		all, err := setsOf(ctx, client, namespace)
		if err != nil {
			return err
		}
		return printSets(s.Out, all, everywhere)
	})
	c.Args = func(cmd *cobra.Command, args []string) error {
		switch {
		case everywhere && len(args) == 1:
			return base.Usagef("-A lists the sets of all namespaces; for the Pods of %s give its namespace by -n", args[0])
		case everywhere && cmd.Flags().Changed("namespace"):
			return base.Usagef("-A lists the sets of all namespaces; leave out -n")
		}
		return nil
	}
	c.Flags().BoolVarP(&everywhere, "all-namespaces", "A", false, "list the sets of all namespaces")
	return c
}

// setsOf returns the sets of a namespace, or of all.
func setsOf(ctx context.Context, client kubernetes.Interface, namespace string) (all []set, err error) {
	deployments, err := client.AppsV1().Deployments(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	daemons, err := client.AppsV1().DaemonSets(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range deployments.Items {
		all = append(all, ofDeployment(&deployments.Items[i]))
	}
	for i := range daemons.Items {
		all = append(all, ofDaemonSet(&daemons.Items[i]))
	}
	slices.SortStableFunc(all, func(a, b set) int { return cmp.Compare(a.namespace, b.namespace) })
	return all, nil
}

func printSets(out io.Writer, all []set, namespaces bool) error {
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	if namespaces {
		fmt.Fprint(w, "NAMESPACE\t")
	}
	fmt.Fprintln(w, "NAME\tKIND\tREADY\tUP-TO-DATE\tAVAILABLE\tAGE\tCOMMAND")
	for _, s := range all {
		if namespaces {
			fmt.Fprintf(w, "%s\t", s.namespace)
		}
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

// NewLogs returns 'fairlead logs'.
func NewLogs(g *base.Global) *cobra.Command {
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
			r := runCommand{Global: s.Global}
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

// logs prints the logs of Pods, one after the other, each line with its Pod's name if there
// are several.
func (s *setCommand) logs(ctx context.Context, client kubernetes.Interface, namespace string, pods []corev1.Pod, tail int64) error {
	o := &corev1.PodLogOptions{}
	if tail >= 0 {
		o.TailLines = &tail
	}
	var errs []error
	for i := range pods {
		prefix := ""
		if len(pods) > 1 {
			prefix = pods[i].Name + ": "
		}
		stream, err := client.CoreV1().Pods(namespace).GetLogs(pods[i].Name, o).Stream(ctx)
		if err == nil {
			err = copyLines(s.Out, stream, prefix)
			stream.Close()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// copyLines copies lines of any length, each behind prefix, and ends the last one.
func copyLines(out io.Writer, in io.Reader, prefix string) error {
	lines := bufio.NewReader(in)
	begin := true
	for {
		part, more, err := lines.ReadLine()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if begin {
			part = append([]byte(prefix), part...)
		}
		if begin = !more; begin {
			part = append(part, '\n')
		}
		if _, err := out.Write(part); err != nil {
			return err
		}
	}
}
