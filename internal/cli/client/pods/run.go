// Package pods has the commands that run programs as Pods, singly or in sets, and that
// register running programs.
package pods

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/fairlead/fairlead/internal/cli/base"
)

const (
	// maxReplicas is a guard against a typing error, not a limit of the system.
	maxReplicas = 1000
)

type runCommand struct {
	*base.Global
	base.ClientFlags
	podFlags
	replicas  int
	detach    bool
	everyNode bool
	dryRun    bool
	output    string
	timeout   time.Duration
	// asSet is set if a Deployment or DaemonSet has the Pods.
	asSet bool
	// workDirGiven is set if --workdir is.
	workDirGiven bool
}

// NewRun returns 'fairlead run'.
func NewRun(g *base.Global) *cobra.Command {
	r := &runCommand{Global: g}
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Run a command as Pods",
		Long: `Run a command of this machine's file system as one or more Pods: each has its own
IP address and is an endpoint of every Service whose selector matches its labels.

With --name and --replicas they are the Pods of a Deployment of that name, which replaces
Pods that fail or whose node is lost; run again with another command it rolls to that one,
Pod by Pod. With --name and --every-node it is a DaemonSet. This command returns when the
set is ready; 'fairlead scale', 'restart', 'ps', 'logs' and 'rm' are for sets.

Pods that are not privileged, as those of a set are, do not see /home, /root and /tmp. A
program from there is shown to them: they get a copy of it, if the file on their node has
the content that it has here. Other files are not. After a change of the program run again.

Otherwise, without --detach, the output of all Pods is shown here, each line with its Pod's
name, and the Pods are deleted when this command is interrupted.`,
		Example: `  fairlead run --name web --replicas 3 -p http=8080 --ready http://:8080/ -- ./server
  fairlead run --name web --replicas 3 --dry-run -o yaml -- ./server
  fairlead run -l app=MyApp -p http=9376 --replicas 3 --ready http://:9376/healthz -- ./server
  fairlead run -l app=web -p 8080 -d -- python3 -m http.server 8080`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return base.Usagef("no command to run; it comes after --, for example: fairlead run -l app=MyApp -p http=9376 -- ./server")
			}
			if r.replicas < 1 || r.replicas > maxReplicas {
				return base.Usagef("--replicas is %d; want 1 to %d", r.replicas, maxReplicas)
			}
			r.command, r.workDirGiven = args, cmd.Flags().Changed("workdir")
			r.asSet = r.everyNode || r.podFlags.name != "" && cmd.Flags().Changed("replicas")
			if r.everyNode && r.podFlags.name == "" {
				return base.Usagef("--every-node needs --name")
			}
			if r.everyNode && cmd.Flags().Changed("replicas") {
				return base.Usagef("--every-node and --replicas: a DaemonSet has one Pod on each node; give one or the other")
			}
			if cmd.Flags().Changed("output") && !r.dryRun {
				return base.Usagef("--output is for --dry-run")
			}
			if r.dryRun && r.replicas > 1 && !r.asSet {
				return base.Usagef("--dry-run prints one object; with --replicas give --name, for a Deployment")
			}
			if r.output != "yaml" && r.output != "json" {
				return base.Usagef("--output is %q; want yaml or json", r.output)
			}
			return r.run(cmd.Context())
		},
	}
	r.Add(cmd)
	r.AddNamespace(cmd)
	flags := cmd.Flags()
	flags.StringVarP(&r.labels, "labels", "l", "", "labels of the Pods, KEY=VALUE[,KEY=VALUE]; Services select by them")
	flags.StringArrayVarP(&r.ports, "port", "p", nil, "a port the command listens on, [NAME=]PORT[/tcp|udp|sctp]; may be repeated")
	flags.StringArrayVarP(&r.podFlags.env, "env", "e", nil, "a variable NAME=VALUE for the command; may be repeated")
	flags.StringVar(&r.podFlags.ready, "ready", "",
		"when a Pod is ready: http://:PORT/PATH, tcp://:PORT or exec:COMMAND (default: when it runs)")
	flags.StringVar(&r.podFlags.name, "name", "",
		"name of the set, with --replicas or --every-node; else what the Pods' names begin with (default: the label app, else the command)")
	flags.StringVar(&r.preStop, "pre-stop", "", "shell command that runs before the command is stopped")
	flags.DurationVar(&r.grace, "grace", 0, "how long the command has to end when it is stopped (default 30s)")
	flags.StringVar(&r.user, "user", "", "user to run as, UID[:GID]")
	flags.StringVar(&r.cpu, "cpu", "", "processors to reserve, and the limit, such as 500m")
	flags.StringVar(&r.memory, "memory", "", "memory to reserve, and the limit, such as 256Mi")
	flags.BoolVar(&r.everyNode, "every-node", false, "one Pod on each node: a DaemonSet")
	flags.BoolVar(&r.dryRun, "dry-run", false, "print the object and create nothing")
	flags.StringVarP(&r.output, "output", "o", "yaml", "format of --dry-run: yaml or json")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"yaml", "json"}, cobra.ShellCompDirectiveNoFileComp))
	flags.StringVar(&r.workDir, "workdir", workingDir(),
		"directory the command starts in; / if Pods do not see the present one")
	flags.StringVar(&r.node, "node", "", "node to run on (default: the scheduler chooses)")
	flags.BoolVar(&r.hostNetwork, "host-network", false, "use the node's network, without a separate address")
	flags.IntVar(&r.replicas, "replicas", 1, "number of Pods")
	flags.BoolVarP(&r.detach, "detach", "d", false, "return when the Pods are ready and leave them running; with a set, return at once")
	flags.DurationVar(&r.timeout, "timeout", time.Minute, "how long to wait for the Pods to become ready")
	return cmd
}

func workingDir() string {
	dir, err := os.Getwd()
	if err != nil {
		return "/"
	}
	return dir
}

func (r *runCommand) run(ctx context.Context) error {
	pod, err := r.pod()
	if err != nil {
		return err
	}
	if r.dryRun {
		if err := r.reveal(ctx, nil, "", pod); err != nil {
			return err
		}
		return r.print(pod)
	}
	client, namespace, err := r.Client()
	if err != nil {
		return err
	}
	if err := checkNode(ctx, client, r.node); err != nil {
		return err
	}
	if err := r.reveal(ctx, client, namespace, pod); err != nil {
		return err
	}
	if r.asSet {
		return r.apply(ctx, client, namespace, pod)
	}
	var names []string
	defer func() {
		if !r.detach {
			r.remove(client, namespace, names)
		}
	}()
	for range r.replicas {
		created, err := client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
		if err != nil {
			return err
		}
		names = append(names, created.Name)
		fmt.Fprintf(r.Err, "pod %s created\n", created.Name)
	}
	if err := r.waitReady(ctx, client, namespace, names); err != nil || r.detach {
		return err
	}
	return r.follow(ctx, client, namespace, names)
}

// checkNode rejects a --node that does not exist, if the user may read Nodes.
func checkNode(ctx context.Context, client kubernetes.Interface, node string) error {
	if node == "" {
		return nil
	}
	_, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return nil // another error comes back with the Pods
	}
	names, err := base.NodeNames(ctx, client)
	if err != nil {
		return nil // likewise
	}
	return fmt.Errorf("--node: there is no node %s; there are: %s%s", node, cmp.Or(strings.Join(names, ", "), "none"),
		base.DidYouMean(node, "", names))
}

// waitReady returns when all Pods are ready, or with what keeps one of them from it: the end
// of ctx too.
func (r *runCommand) waitReady(ctx context.Context, client kubernetes.Interface, namespace string, names []string) error {
	for _, name := range names {
		var last *corev1.Pod
		deleted := false
		limited, cancel := context.WithTimeout(ctx, r.timeout)
		_, err := watchtools.UntilWithSync(limited, podWatch(client, namespace, name), &corev1.Pod{}, nil,
			func(e watch.Event) (bool, error) {
				p, ok := e.Object.(*corev1.Pod)
				if !ok {
					return false, fmt.Errorf("watch of pod %s: %v", name, e.Object)
				}
				if e.Type == watch.Deleted {
					deleted = true
					return true, nil
				}
				last = p
				return ready(p) || cannotStart(p) != "", nil
			})
		cancel()
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("interrupted before pod %s was ready: %w", name, ctx.Err())
		case deleted:
			return fmt.Errorf("pod %s was deleted before it was ready", name)
		case last != nil && cannotStart(last) != "":
			return fmt.Errorf("pod %s cannot be started: %s", name, cannotStart(last))
		case err == nil:
			fmt.Fprintf(r.Err, "pod %s ready on %s at %s\n", name, last.Spec.NodeName, last.Status.PodIP)
		case last != nil:
			return fmt.Errorf("pod %s is not ready after %s: %s", name, r.timeout, base.PodTrouble(last))
		default:
			return err
		}
	}
	return nil
}

func podWatch(client kubernetes.Interface, namespace, name string) cache.ListerWatcher {
	return cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "pods", namespace,
		fields.OneTermEqualSelector(metav1.ObjectNameField, name))
}

// follow copies the Pods' output until ctx ends or all Pods are gone.
func (r *runCommand) follow(ctx context.Context, client kubernetes.Interface, namespace string, names []string) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, name := range names {
		wg.Go(func() {
			r.followOne(ctx, client, namespace, name, func(line string) {
				mu.Lock()
				defer mu.Unlock()
				fmt.Fprintf(r.Out, "%s: %s\n", name, line)
			})
		})
	}
	wg.Wait()
	return nil
}

// followOne reads a Pod's log, again after its container restarts.
func (r *runCommand) followOne(ctx context.Context, client kubernetes.Interface, namespace, name string, print func(string)) {
	var since *metav1.Time
	for ctx.Err() == nil {
		stream, err := client.CoreV1().Pods(namespace).GetLogs(name, &corev1.PodLogOptions{Follow: true, SinceTime: since}).Stream(ctx)
		if apierrors.IsNotFound(err) || ctx.Err() != nil {
			return
		}
		if err == nil {
			lines := bufio.NewScanner(stream)
			lines.Buffer(nil, 1<<20)
			for lines.Scan() {
				print(lines.Text())
			}
			stream.Close()
			now := metav1.Now()
			since = &now
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// remove deletes the Pods and waits until their processes have ended.
func (r *runCommand) remove(client kubernetes.Interface, namespace string, names []string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, name := range names {
		err := client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			fmt.Fprintf(r.Err, "pod %s could not be deleted: %s\n", name, base.OneLine(err))
		}
	}
	for _, name := range names {
		_, err := watchtools.UntilWithSync(ctx, podWatch(client, namespace, name), &corev1.Pod{},
			func(store cache.Store) (bool, error) { return len(store.List()) == 0, nil },
			func(e watch.Event) (bool, error) { return e.Type == watch.Deleted, nil })
		if err != nil {
			fmt.Fprintf(r.Err, "pod %s has not ended: %s\n", name, base.OneLine(err))
			continue
		}
		fmt.Fprintf(r.Err, "pod %s deleted\n", name)
	}
}
