from packhorse.cli import main

if __name__ == "__main__":
    main()
