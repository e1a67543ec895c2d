from cutaway.cli import main

main()
