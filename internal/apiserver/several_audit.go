package apiserver

import (
	"net"
	"net/http"
	"slices"
	"time"

	authnv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	auditapi "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/fairlead/fairlead/internal/apiserver/members"
)

// serverTokenUser begins the name that the audit log has for a server that joins; the ID of its
// token follows.
const serverTokenUser = "system:server-token:"

// Annotations of the audit log about a server that joins.
const (
	auditServer = "fairlead.dev/server"
	auditPeer   = "fairlead.dev/peer"
)

// auditJoining returns what writes the steps of a server that joins into the audit log of c, as
// its policy says: such requests are recognised by their token alone, before the filters that
// audit all others.
func auditJoining(c *genericapiserver.Config) func(members.Step) {
	return func(s members.Step) {
		if c.AuditBackend == nil || c.AuditPolicyRuleEvaluator == nil {
			return
		}
		const verb = "post"
		who := &user.DefaultInfo{Name: serverTokenUser + s.Token}
		rule := c.AuditPolicyRuleEvaluator.EvaluatePolicyRule(&authorizer.AttributesRecord{User: who, Verb: verb, Path: s.Path})
		if rule.Level == auditapi.LevelNone || slices.Contains(rule.OmitStages, auditapi.StageResponseComplete) {
			return
		}
		e := &auditapi.Event{
			Level: auditapi.LevelMetadata, AuditID: types.UID(uuid.NewUUID()), Stage: auditapi.StageResponseComplete,
			RequestURI: s.Path, Verb: verb, User: authnv1.UserInfo{Username: who.Name},
			ResponseStatus: &metav1.Status{Code: http.StatusOK}, Annotations: map[string]string{auditServer: s.Server},
		}
		if s.Peer != "" {
			e.Annotations[auditPeer] = s.Peer
		}
		if host, _, err := net.SplitHostPort(s.From); err == nil {
			e.SourceIPs = []string{host}
		}
		e.StageTimestamp = metav1.NewMicroTime(time.Now())
		e.RequestReceivedTimestamp = e.StageTimestamp
		c.AuditBackend.ProcessEvents(e)
	}
}
