package podspec

import (
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// row describes how some fields of a PodSpec are treated. A field stands for the fields
// below it; initContainers have the fields of containers.
type row struct {
	fields string
	state  State
	why    string
	fits   fits // the values for which the state holds; nil for all
}

// Reasons that several rows have.
const (
	whyVolume    = "the node only mounts emptyDir, hostPath, configMap, secret, downwardAPI and projected volumes"
	whyScheduler = "no Pod has to make room for another one"
	whyClaims    = "there are no ResourceClaims"
)

// table has each field of a PodSpec; docs/compatibility.md shows it.
var table = []row{
	{"containers.name containers.command containers.args containers.workingDir containers.envFrom containers.env.name " +
		"containers.env.value containers.env.valueFrom.fieldRef containers.env.valueFrom.configMapKeyRef " +
		"containers.env.valueFrom.secretKeyRef containers.restartPolicy containers.lifecycle.postStart containers.lifecycle.preStop " +
		"containers.stdin containers.stdinOnce containers.tty containers.terminationMessagePolicy", Done, "", nil},
	{"containers.image", Done, "`host`, or `fairlead.dev/registered` of a program that runs already (docs/registered.md), " +
		"or an image that the node has a program for (`--image-map`, docs/sets.md); " +
		"with another one the container waits, reason ImageNotSupported", nil},
	{"containers.imagePullPolicy imagePullSecrets", Moot, "no image is pulled", nil},
	{"containers.ports.name containers.ports.containerPort containers.ports.protocol", Done, "", nil},
	{"containers.ports.hostPort containers.ports.hostIP", Done,
		"the node's proxy leads the port to the Pod (docs/proxy.md); two Pods with one port go to two nodes; where spec.nodeName " +
			"or a file puts them on one, the second fails, reason NodePorts", nil},
	{"containers.env.valueFrom.resourceFieldRef", Done, "also in volumes; a limit that is not set is what the node has", nil},
	{"containers.env.valueFrom.fileKeyRef", Refused, "the node does not know this source", nil},
	{"containers.resources.limits containers.resources.requests", Done,
		"control groups of version 2; without them a condition of the Node", nil},
	{"containers.resources.claims resourceClaims resources.claims", Refused, whyClaims, nil},
	{"containers.resizePolicy", Moot, "a Pod is never resized", nil},
	{"containers.restartPolicyRules", Refused, "the node restarts only by restartPolicy", nil},
	{"containers.volumeMounts.name containers.volumeMounts.readOnly containers.volumeMounts.subPath containers.volumeMounts.subPathExpr",
		Done, "", nil},
	{"containers.volumeMounts.mountPath", Done, "any path; a path that the node lacks exists only in the container, which does not see " +
		"what others create beside it later", nil},
	{"containers.volumeMounts.recursiveReadOnly containers.volumeMounts.bindMountOptions", Refused, "the node does not mount so", nil},
	{"containers.volumeMounts.mountPropagation", Refused, "mounts of a container are its own", func(v reflect.Value, _ *corev1.PodSpec) bool {
		return v.Elem().String() != string(corev1.MountPropagationNone)
	}},
	{"containers.volumeDevices", Refused, "there are no block volumes", nil},
	{probes("exec httpGet.path httpGet.port httpGet.host httpGet.scheme httpGet.httpHeaders tcpSocket grpc " +
		"initialDelaySeconds timeoutSeconds " +
		"periodSeconds successThreshold failureThreshold terminationGracePeriodSeconds"), Done, "", nil},
	{probes("httpGet.protocol"), Warned, "the node probes with HTTP/1.1", nil},
	{"containers.lifecycle.stopSignal", Refused, "containers are stopped by SIGTERM", nil},
	{"containers.terminationMessagePath", Done, "", nil},
	{"containers.securityContext.runAsUser containers.securityContext.runAsGroup securityContext.runAsUser securityContext.runAsGroup",
		Done, "", nil},
	{"containers.securityContext.capabilities containers.securityContext.privileged containers.securityContext.runAsNonRoot " +
		"securityContext.runAsNonRoot containers.securityContext.readOnlyRootFilesystem " +
		"containers.securityContext.allowPrivilegeEscalation", Done, "", nil},
	{"containers.securityContext.seccompProfile securityContext.seccompProfile", Done, "nodes refuse the type Localhost", nil},
	{"containers.securityContext.procMount", Done, "Unmasked is for Pods that may be privileged", nil},
	{"containers.securityContext.seLinuxOptions securityContext.seLinuxOptions securityContext.seLinuxChangePolicy " +
		"containers.securityContext.appArmorProfile securityContext.appArmorProfile", Warned,
		"nodes set neither SELinux labels nor AppArmor profiles", nil},
	{"containers.securityContext.windowsOptions securityContext.windowsOptions", Moot, "nodes run Linux", nil},
	{"securityContext.supplementalGroups securityContext.fsGroup securityContext.fsGroupChangePolicy",
		Done, "not without root, where there is one user", nil},
	{"securityContext.supplementalGroupsPolicy", Done, "always as Strict: no group comes from the machine's /etc/group", nil},
	{"securityContext.sysctls", Refused, "the node sets no sysctls for a Pod", nil},

	{"volumes.name volumes.hostPath volumes.configMap volumes.secret", Done, "", nil},
	{"volumes.emptyDir.sizeLimit", Done,
		"in memory the size; a directory of the disk is measured, and the Pod evicted, also above 4,194,304 files", nil},
	{"volumes.emptyDir.medium", Refused, "an empty directory is on the node's disk or, with `Memory`, in memory",
		func(v reflect.Value, _ *corev1.PodSpec) bool { return v.String() != string(corev1.StorageMediumMemory) }},
	{"volumes.emptyDir.mode", Warned, "everybody in the Pod may write to it", nil},
	{"volumes.downwardAPI", Done, "", nil},
	{"volumes.projected.defaultMode volumes.projected.sources.secret volumes.projected.sources.downwardAPI " +
		"volumes.projected.sources.configMap volumes.projected.sources.serviceAccountToken", Done, "", nil},
	{"volumes.projected.sources.clusterTrustBundle volumes.projected.sources.podCertificate", Refused, "there are no such objects", nil},
	{"volumes.projected.defaultUser", Warned, "files of volumes belong to root", nil},
	{"volumes.image", Refused, "there are no images: a Pod is a process of the machine, with its files", nil},
	{"volumes.gcePersistentDisk volumes.awsElasticBlockStore volumes.gitRepo volumes.nfs volumes.iscsi volumes.glusterfs " +
		"volumes.persistentVolumeClaim volumes.rbd volumes.flexVolume volumes.cinder volumes.cephfs volumes.flocker volumes.fc " +
		"volumes.azureFile volumes.vsphereVolume volumes.quobyte volumes.azureDisk volumes.photonPersistentDisk volumes.portworxVolume " +
		"volumes.scaleIO volumes.storageos volumes.csi volumes.ephemeral", Refused, whyVolume, nil},

	{"restartPolicy terminationGracePeriodSeconds dnsPolicy dnsConfig nodeSelector nodeName serviceAccountName serviceAccount " +
		"automountServiceAccountToken hostNetwork hostPID hostIPC hostname subdomain schedulerName tolerations hostAliases readinessGates " +
		"enableServiceLinks schedulingGates activeDeadlineSeconds", Done, "", nil},
	{"ephemeralContainers", Refused, "there is nothing to add to a process; the server rejects them with 422", nil},
	{"shareProcessNamespace", Moot, "the containers of a Pod always share one, that of the node if the Pod may be privileged", nil},
	{"affinity topologySpreadConstraints", Done, "also without them, Pods with the same labels are spread over nodes and zones", nil},
	{"priorityClassName preemptionPolicy schedulingGroup", Warned, whyScheduler, nil},
	{"overhead", Warned, "a Pod is a few processes, and nothing beside them", nil},
	{"priority", Warned, whyScheduler, func(v reflect.Value, _ *corev1.PodSpec) bool { return v.Elem().Int() != 0 }},
	{"evictionResponders", Moot, "nodes do not evict Pods", nil},
	{"runtimeClassName", Warned, "there are no RuntimeClasses", nil},
	{"setHostnameAsFQDN", Warned, "the host name is the Pod's name or spec.hostname", isTrue},
	{"hostnameOverride", Refused, "the host name is the Pod's name or spec.hostname", nil},
	{"os", Refused, "nodes run Linux", func(v reflect.Value, _ *corev1.PodSpec) bool {
		return v.Elem().FieldByName("Name").String() != string(corev1.Linux)
	}},
	{"hostUsers", Warned, "Pods that may be privileged are in the user namespace of the agent", isFalse},
	{"resources.limits resources.requests", Done, "as in containers", nil},
}

// probes are fields of all three kinds of probes.
func probes(fields string) string {
	out := ""
	for _, kind := range []string{"livenessProbe", "readinessProbe", "startupProbe"} {
		for _, f := range strings.Fields(fields) {
			out += "containers." + kind + "." + f + " "
		}
	}
	return out
}
