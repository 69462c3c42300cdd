package svc

// The paths at which a server of fairlead answers questions with the rights of the user who asks.
const (
	ExplainPath  = "/fairlead/explain"
	HistoryPath  = "/fairlead/history"
	StatusPath   = "/fairlead/status"
	ServicesPath = "/fairlead/services"
	// ConnectionsPath answers what nodes count of connections to Services, and who has them.
	ConnectionsPath = "/fairlead/connections"
)

// QuestionPaths are all of them.
func QuestionPaths() []string {
	return []string{ExplainPath, HistoryPath, StatusPath, ServicesPath, ConnectionsPath}
}
