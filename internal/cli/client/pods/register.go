package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	watchtools "k8s.io/client-go/tools/watch"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/systemd"
)

type registerCommand struct {
	*base.Global
	base.ClientFlags
	spec    registration.Spec
	labels  string
	file    string
	dryRun  bool
	output  string
	timeout time.Duration
	hook    bool
	via     string
}

// NewRegister returns 'fairlead register'.
func NewRegister(g *base.Global) *cobra.Command {
	r := &registerCommand{Global: g}
	cmd := &cobra.Command{
		Use:   "register --name NAME -p PORT [flags]",
		Short: "Register a running program as a Service endpoint",
		Long: `Register a program that fairlead does not start, such as one of systemd, as an endpoint of
every Service whose selector matches the labels. The agent of its node checks it every
second; endpoints follow. It is the Pod NAME-NODE: 'kubectl get pods' shows it, and
'fairlead deregister NAME' deletes it. Deleting it does not stop the program.

On a joined node without a kubeconfig of an administrator it writes a file for the node's
agent, which registers the program if an administrator allows that; else it prints the
command that does (docs/registered.md).

Without --ready, --unit and --pid-file the program is ready while its first TCP port
takes connections. The same flags again change nothing; other flags replace them.`,
		Example: `  fairlead register --name redis -l app=redis -p redis=6379
  fairlead register --name redis -l app=redis -p redis=6379 --unit redis-server.service
  fairlead register --name web -l app=web -p 8080 --unit web.service --install-hook
  fairlead register --name pg -l app=pg -p pg=5432 --ready "exec:pg_isready -h 10.1.2.3"
  fairlead register --name rds -l app=orders-db -p 5432 --address 10.1.2.3 --via vm1
  fairlead register -f programs.yaml`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.run(cmd) },
	}
	r.Add(cmd)
	r.AddNamespace(cmd)
	flags := cmd.Flags()
	flags.StringVar(&r.spec.Name, "name", "", "name of the program")
	flags.StringVarP(&r.labels, "labels", "l", "", "labels, KEY=VALUE[,KEY=VALUE]; Services select by them")
	flags.StringArrayVarP(&r.spec.Ports, "port", "p", nil, "a port the program listens on, [NAME=]PORT[/tcp|udp|sctp]; may be repeated")
	flags.StringVar(&r.spec.Ready, "ready", "",
		"when it is ready: http://:PORT/PATH, tcp://:PORT, exec:COMMAND (run by the agent, as its user), or none for no check")
	flags.StringVar(&r.spec.ReadyTimeout, "ready-timeout", "",
		"how long an answer to --ready may take before the program is not ready: 1s to 60s (default 1s)")
	flags.StringVar(&r.spec.Unit, "unit", "", "the program's systemd unit; the program is not ready while the unit is not active")
	flags.StringVar(&r.spec.PIDFile, "pid-file", "", "file with the program's process ID; it is not ready without the process")
	flags.StringVar(&r.spec.Address, "address", "", "IP address of the program (default: the node's)")
	flags.StringVar(&r.spec.Weight, "weight", "",
		"its `share` of connections compared with other endpoints, 0 to 256 (default 1): by load balancers of the proxied way, and by\n"+
			"mode ipvs with a scheduler such as wrr; 0 in every mode")
	flags.StringVar(&r.spec.Node, "node", base.Hostname(), "node whose agent checks the program")
	flags.StringVar(&r.via, "via", "", "with --address of a machine without fairlead: the node that checks it, in place of --node")
	flags.StringVarP(&r.file, "file", "f", "", "YAML file with programs (docs/registered.md), in place of the flags; - for the standard input")
	flags.BoolVar(&r.dryRun, "dry-run", false, "print the Pods and change nothing")
	flags.StringVarP(&r.output, "output", "o", "", "with --dry-run: yaml (the default) or json")
	flags.BoolVar(&r.hook, "install-hook", false,
		"make systemd wait until no node sends new connections to --unit, a unit of this machine, a second at most, before it\n"+
			"stops its process")
	flags.DurationVar(&r.timeout, "timeout", 5*time.Second, "how long to wait for the first check; 0 for not at all")
	return cmd
}

// flagsOf are the flags of the fields of a Spec.
var flagsOf = map[string]string{"labels": "labels", "ports": "port", "pidFile": "pid-file", "readyTimeout": "ready-timeout"}

func (r *registerCommand) run(cmd *cobra.Command) error {
	if r.output != "" && (!r.dryRun || !slices.Contains([]string{"yaml", "json"}, r.output)) {
		return base.Usagef("--output is for --dry-run, and yaml or json")
	}
	if r.via != "" {
		if r.spec.Address == "" || cmd.Flags().Changed("node") {
			return base.Usagef("--via is for --address, and in place of --node: the node that checks a machine without fairlead")
		}
		r.spec.Node = r.via
	}
	if r.hook && (r.spec.Unit == "" || r.spec.Node != base.Hostname() || r.dryRun) {
		return base.Usagef("--install-hook is for a --unit of this machine, which is the node %s, and not for --dry-run", base.Hostname())
	}
	specs, err := r.specs(cmd)
	if err != nil {
		return err
	}
	var client kubernetes.Interface
	namespace := r.Namespace
	if !r.dryRun {
		if client, namespace, err = r.Client(); err != nil {
			return r.byAgent(cmd, err, specs)
		}
		if err := checkNode(cmd.Context(), client, r.spec.Node); err != nil {
			return err
		}
	}
	pods := make([]*corev1.Pod, len(specs))
	for i := range specs {
		specs[i].Namespace = cmp.Or(specs[i].Namespace, namespace)
		if pods[i], err = specs[i].Pod(); err != nil {
			return err // not for Specs that specs has checked
		}
	}
	if r.dryRun {
		return writePods(r.Out, pods, r.output)
	}
	var errs []error
	for i, pod := range pods {
		if err := removeOldHook(cmd.Context(), client, pod, systemd.RemoveHook); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", specs[i].Name, err))
			continue
		}
		if err := r.register(cmd.Context(), client, specs[i].Name, pod); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", specs[i].Name, err))
		}
	}
	if r.hook && len(errs) == 0 {
		return r.installHook(cmd.Context(), pods[0])
	}
	return errors.Join(errs...)
}

func (r *registerCommand) installHook(ctx context.Context, pod *corev1.Pod) error {
	unit := pod.Annotations[svc.UnitAnnotation]
	if err := systemd.InstallHook(ctx, unit, systemd.HookWait); err != nil {
		return fmt.Errorf("--install-hook: %w", err)
	}
	fmt.Fprintf(r.Out, "%s waits until no node sends it new connections, %s at most, before its process is stopped: %s\n",
		unit, systemd.HookWait, systemd.HookPath(unit))
	return nil
}

// specs returns the programs of the flags or the file.
func (r *registerCommand) specs(cmd *cobra.Command) ([]registration.Spec, error) {
	if r.file != "" {
		for _, name := range []string{"name", "labels", "port", "ready", "unit", "pid-file", "address", "weight"} {
			if cmd.Flags().Changed(name) {
				return nil, base.Usagef("--%s and --file: the file sets it", name)
			}
		}
		data, err := readFileOr(cmd.InOrStdin(), r.file)
		if err != nil {
			return nil, err
		}
		return registration.Parse(r.file, r.spec.Node, data)
	}
	if r.spec.Name == "" {
		return nil, base.Usagef("which program? give it a --name, for example: fairlead register --name redis -l app=redis -p redis=6379")
	}
	set, err := labels.ConvertSelectorToLabelsMap(r.labels)
	if err != nil {
		return nil, base.Usagef("--labels %q: %w; want KEY=VALUE[,KEY=VALUE]", r.labels, err)
	}
	r.spec.Labels = set
	_, err = r.spec.Pod()
	var wrong registration.FieldError
	if errors.As(err, &wrong) {
		return nil, base.Usagef("--%s: %w", cmp.Or(flagsOf[wrong.Field], wrong.Field), wrong.Err)
	}
	return []registration.Spec{r.spec}, err
}

func readFileOr(in io.Reader, path string) ([]byte, error) {
	if path == "-" {
		return io.ReadAll(in)
	}
	return os.ReadFile(path)
}

func writePods(w io.Writer, pods []*corev1.Pod, format string) error {
	for i, p := range pods {
		if format == "json" {
			if err := base.OutputFlag("json").Write(w, p, nil); err != nil {
				return err
			}
			continue
		}
		text, err := yaml.Marshal(p)
		if err != nil {
			return err
		}
		if i > 0 {
			fmt.Fprintln(w, "---")
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
	}
	return nil
}

// register writes the Pod of a program and reports the result of its first check.
func (r *registerCommand) register(ctx context.Context, client kubernetes.Interface, name string, pod *corev1.Pod) error {
	changed, err := registration.Write(ctx, client, pod)
	if err != nil {
		return err
	}
	what := "registered"
	if !changed {
		what = "is registered already"
	}
	fmt.Fprintf(r.Out, "%s %s on node %s as pod %s\n", name, what, pod.Spec.NodeName, pod.Name)
	if r.timeout <= 0 {
		return nil
	}
	var last *corev1.Pod
	limited, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	_, err = watchtools.UntilWithSync(limited, podWatch(client, pod.Namespace, pod.Name), &corev1.Pod{}, nil,
		func(e watch.Event) (bool, error) {
			p, ok := e.Object.(*corev1.Pod)
			if !ok || e.Type == watch.Deleted {
				return false, fmt.Errorf("the pod %s was deleted", pod.Name)
			}
			last = p
			return ready(p), nil
		})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil:
		fmt.Fprintf(r.Out, "%s is ready at %s\n", name, last.Status.PodIP)
		return nil
	case last == nil:
		return err
	}
	fmt.Fprintf(r.Err, "%s is not ready yet: %s\n", name, r.notReady(ctx, client, last))
	return nil
}

// notReady returns why a registered program is not ready: the last Event of its check, if
// that is what it waits for.
func (r *registerCommand) notReady(ctx context.Context, client kubernetes.Interface, p *corev1.Pod) string {
	if len(p.Status.ContainerStatuses) == 0 {
		return "the agent of node " + p.Spec.NodeName + " has not taken it"
	}
	if p.Status.ContainerStatuses[0].State.Running == nil {
		return base.PodTrouble(p)
	}
	list, err := client.CoreV1().Events(p.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(p.UID)})
	if err != nil || len(list.Items) == 0 {
		return "its check does not pass"
	}
	latest := slices.MaxFunc(list.Items, func(a, b corev1.Event) int { return a.LastTimestamp.Compare(b.LastTimestamp.Time) })
	return latest.Message
}

// NewDeregister returns 'fairlead deregister'.
func NewDeregister(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var node string
	cmd := &cobra.Command{
		Use:   "deregister NAME...",
		Short: "Remove programs that 'fairlead register' registered from Services",
		Long: `Remove programs that 'fairlead register' registered from all Services. The programs
keep running.`,
		Example: "  fairlead deregister redis",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return base.Usagef("which program? for example: fairlead deregister redis")
			}
			client, namespace, err := f.Client()
			if err != nil {
				return deregisterByAgent(cmd, g.Out, err, &f, args)
			}
			var errs []error
			for _, name := range args {
				if err := deregister(cmd.Context(), client, namespace, name, node, systemd.RemoveHook); err != nil {
					errs = append(errs, err)
					continue
				}
				fmt.Fprintf(g.Out, "%s is no longer registered on node %s\n", name, node)
			}
			return errors.Join(errs...)
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	cmd.Flags().StringVar(&node, "node", base.Hostname(), "node on which the program is registered")
	return cmd
}

// hookRemover is systemd.RemoveHook.
type hookRemover func(ctx context.Context, unit string) (removed bool, err error)

// removeOldHook removes the hook of the unit that the program was, where pod gives it
// another one; before pod is written, which forgets the unit.
func removeOldHook(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, remove hookRemover) error {
	if pod.Spec.NodeName != base.Hostname() {
		return nil
	}
	old, err := client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	unit := old.Annotations[svc.UnitAnnotation]
	fromFile := old.Annotations[svc.ServicesFileAnnotation] != "" // which is not replaced
	if !registration.Is(old) || fromFile || unit == "" || unit == pod.Annotations[svc.UnitAnnotation] {
		return nil
	}
	if _, err := remove(ctx, unit); err != nil {
		return fmt.Errorf("remove the hook of %s, its previous unit: %w", unit, err)
	}
	return nil
}

// deregister deletes the Pod last: if the removal of the hook fails, the Pod still names its unit.
func deregister(ctx context.Context, client kubernetes.Interface, namespace, name, node string, remove hookRemover) error {
	pods := client.CoreV1().Pods(namespace)
	pod, err := pods.Get(ctx, registration.PodName(name, node), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s is not registered on node %s in namespace %s", name, node, namespace)
	case err != nil:
		return err
	case !registration.Is(pod):
		return fmt.Errorf("pod %s is not a registered program", pod.Name)
	}
	if file := pod.Annotations[svc.ServicesFileAnnotation]; file != "" {
		return fmt.Errorf("%s is registered by the file %s of node %s: remove it there", name, file, node)
	}
	if unit := pod.Annotations[svc.UnitAnnotation]; unit != "" && node == base.Hostname() {
		if _, err := remove(ctx, unit); err != nil {
			return fmt.Errorf("%s is still registered, because the hook of %s cannot be removed: %w", name, unit, err)
		}
	}
	err = pods.Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}
